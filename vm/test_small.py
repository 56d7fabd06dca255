"""Tests of how small kernels are configured and cached. Booting them is test_kernel.py's."""

from pathlib import Path

import kernels
import pytest
import small


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built from now on, in a cache and with settings of its own; it takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(small, "CONFIG", tmp_path)
    (tmp_path / "base.config").write_text("CONFIG_NET=y\n")
    (tmp_path / "debug.config").write_text("# CONFIG_NET is not set\nCONFIG_KASAN=y\n")
    monkeypatch.setattr(small, "source", lambda: tmp_path / "linux-source-6.12_1" / "source")
    names: list[str] = []

    def build(name: str, linux: Path, wanted: small.Settings, place: Path) -> None:
        names.append(name)
        (place / "boot").mkdir(parents=True)
        (place / "boot" / "vmlinuz").write_text(str(sorted(wanted.items())))

    monkeypatch.setattr(small, "build", build)
    return names


def test_a_kernel_is_built_once_for_the_same_settings(built: list[str], tmp_path: Path) -> None:
    first = kernels.find("base")
    assert kernels.find("base") == first
    config = tmp_path / "base.config"
    config.write_text(f"# Why not.\n{config.read_text()}")
    assert kernels.find("base") == first, "comments are not settings"
    assert built == ["base"]
    config.write_text("CONFIG_NET=m\n")
    assert kernels.find("base") != first
    assert built == ["base", "base"]


def test_debug_may_take_back_what_base_says(built: list[str]) -> None:
    image = kernels.find("base-debug").image
    assert image.read_text() == "[('CONFIG_KASAN', 'y'), ('CONFIG_NET', 'n')]"


def test_a_setting_that_linux_drops_is_an_error() -> None:
    wanted = small.settings('CONFIG_A=y\n# CONFIG_B is not set\n# Prose.\nCONFIG_C="c"\n')
    small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_C="c"\nCONFIG_D=y\n'))
    with pytest.raises(kernels.Unavailable, match="CONFIG_A is m, not y"):
        small.compare(wanted, small.settings('CONFIG_A=m\nCONFIG_C="c"\n'))
    with pytest.raises(kernels.Unavailable, match="CONFIG_B is y, not n"):
        small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_B=y\nCONFIG_C="c"\n'))


def test_every_setting_is_said_once() -> None:
    for names in small.CONFIGS.values():
        for name in names:
            text = (small.CONFIG / f"{name}.config").read_text()
            said = [line for line in text.splitlines() if small.settings(line)]
            assert len(said) == len(small.settings(text)), name
            assert len(said) > 20
