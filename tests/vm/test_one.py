"""The machine that `make test` boots: a load and a save, on a stock kernel."""

import pytest

from tests.vm.programs import TARGET
from vm.fixtures import passed, vm

SCRIPT = """
set -e
head -c 5000123 /dev/urandom >/mnt/file
sync /mnt/file
$1 load --quiet --io direct --to memfd /mnt/file -- \\
    sh -c 'head -c $DMAFILE_BYTES /proc/self/fd/$DMAFILE_FD' >/tmp/loaded
cmp /mnt/file /tmp/loaded
$1 load --quiet --to udmabuf /mnt/file -- \\
    sh -c '$0 save --quiet --length $DMAFILE_BYTES fd:$DMAFILE_FD /mnt/saved' $1
cmp /mnt/file /mnt/saved
echo "loaded and saved"
"""


@pytest.mark.usefixtures("ready_for_one")
def test_a_file_is_loaded_and_saved() -> None:
    words = ("--kernel=6.12", "--fs=ext4", "--", "sh", "-c", SCRIPT, "sh")
    passed(vm(*words, TARGET / "debug" / "dmafile"), "loaded and saved")
