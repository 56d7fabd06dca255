"""Tests of how small kernels are configured and cached. test_kernel.py boots them."""

from pathlib import Path

import pytest

from vm import debian, kernels, series, small
from vm.host import Unavailable


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels built so far, in an empty cache; the build only writes a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(small, "CONFIG", tmp_path)
    (tmp_path / "base.config").write_text("CONFIG_NET=y\n")
    (tmp_path / "debug.config").write_text("# CONFIG_NET is not set\nCONFIG_KASAN=y\n")
    (tmp_path / "series.config").write_text("CONFIG_NEW=y\n")
    monkeypatch.setattr(debian, "linux_source", lambda: tmp_path / "linux-source-6.12_1" / "source")
    names: list[str] = []

    def build(name: str, linux: Path, wanted: small.Settings, place: Path) -> None:
        names.append(name)
        (place / "boot").mkdir(parents=True, exist_ok=True)
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


def test_debug_overrides_base(built: list[str]) -> None:
    wanted = {
        "CONFIG_KASAN": "y",
        "CONFIG_LOCALVERSION": '"-dmafile-base-debug"',
        "CONFIG_NET": "n",
    }
    assert kernels.find("base-debug").image.read_text() == str(sorted(wanted.items()))


def test_a_setting_that_linux_drops_is_an_error() -> None:
    wanted = small.settings('CONFIG_A=y\n# CONFIG_B is not set\n# Prose.\nCONFIG_C="c"\n')
    small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_C="c"\nCONFIG_D=y\n'))
    with pytest.raises(Unavailable, match="CONFIG_A is m, not y"):
        small.compare(wanted, small.settings('CONFIG_A=m\nCONFIG_C="c"\n'))
    with pytest.raises(Unavailable, match="CONFIG_B is y, not n"):
        small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_B=y\nCONFIG_C="c"\n'))


def test_every_setting_is_given_once() -> None:
    for names in small.CONFIGS.values():
        for name in names:
            text = (small.CONFIG / f"{name}.config").read_text()
            said = [line for line in text.splitlines() if small.settings(line)]
            assert len(said) == len(small.settings(text)), name
            assert said, name


def test_a_kernel_of_the_series_is_built_again_for_another_patch(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linux = tmp_path / "linux-source-6.12_1" / "source"
    (linux / "mm").mkdir(parents=True)
    (linux / "mm" / "old.c").write_text("one\ntwo\nthree\n")
    monkeypatch.setattr(series, "SERIES", tmp_path / "series")
    hooks, new = tmp_path / "series" / "hooks", tmp_path / "series" / "new" / "mm"
    for folder in (hooks, new):
        folder.mkdir(parents=True)
    hook = "--- a/mm/old.c\n+++ b/mm/old.c\n@@ -2,2 +2,2 @@\n-two\n+2\n three\n"
    (hooks / "0001-a.patch").write_text(f"Subject: a\n\nWhy.\n---\nnew: mm/new.c\n{hook}")
    (new / "new.c").write_text("new\n")
    first = kernels.find("series")
    assert kernels.find("series") == first
    with series.tree(linux) as tree:
        assert (tree / "mm" / "old.c").read_text() == "one\n2\nthree\n"
        assert (tree / "mm" / "new.c").read_text() == "new\n"
    with series.tree(linux, 0):
        assert (tree / "mm" / "old.c").read_text() == "one\ntwo\nthree\n"
        assert not (tree / "mm" / "new.c").exists()
    with series.tree(linux):
        assert (tree / "mm" / "old.c").read_text() == "one\n2\nthree\n"
    assert (linux / "mm" / "old.c").read_text() == "one\ntwo\nthree\n", "Debian's stays as it is"
    unchanged = (tree / "mm" / "new.c").stat().st_mtime_ns
    (hooks / "0001-a.patch").write_text("Subject: a\n\nWhy.\n---\nnew: mm/new.c\n")
    assert kernels.find("series") == first
    assert (tree / "mm" / "old.c").read_text() == "one\ntwo\nthree\n"
    assert (tree / "mm" / "new.c").stat().st_mtime_ns == unchanged, "it would be compiled again"
    (hooks / "0001-a.patch").unlink()
    assert kernels.find("series") == first
    assert not (tree / "mm" / "new.c").exists()
    assert built == ["series"] * 3
