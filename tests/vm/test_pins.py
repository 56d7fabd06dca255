"""`dmafile pins` with a program that pins known memory, on stock kernels and the series.

One boot per kernel. The checks are in tests/vm/inside/pins.py, which runs in the machine.
"""

import os

import pytest

from tests.vm.programs import Programs
from vm import kernels, series
from vm.fixtures import passed

matrix = pytest.mark.skipif(not os.environ.get("MATRIX"), reason="make test-all PARTS=matrix")
KERNELS = ["6.12", *(pytest.param(name, marks=matrix) for name in ("6.1", kernels.NEWEST))]


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("kernel", KERNELS)
def test_reported_pins_equal_those_that_were_made(programs: Programs, kernel: str) -> None:
    options = (f"--kernel={kernel}", "--fs=ext4")
    passed(programs.run("pins", options=options), "facts checked")


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_pins_equal_those_that_were_made(programs: Programs, kernel: str) -> None:
    rounds = os.environ.get("ROUNDS", "12")
    # The second disk is for VFIO.
    options = (f"--kernel={kernel}", "--fs=ext4", "--fs=raw", "--iommu=intel")
    result = programs.run("pins", rounds, options=options)
    passed(result, "facts checked")


@matrix
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("kernel", [f"series-{version}" for version in series.VERSIONS])
@pytest.mark.parametrize("tracker", ["on", "off"])
def test_pins_counted_by_the_series_equal_those_that_were_made(
    programs: Programs, kernel: str, tracker: str
) -> None:
    options = (f"--kernel={kernel}", f"--append=pin_owner={tracker}")
    result = programs.run("pins", "tracked", options=options)
    passed(result, f"facts checked, the tracker is {tracker}")
