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
    source = tmp_path / "linux-source-6.12_1" / "source"
    monkeypatch.setattr(debian, "linux_source", lambda version: source)
    names: list[str] = []

    def build(name: str, linux: Path, wanted: small.Settings, place: Path) -> None:
        names.append(name)
        (place / "boot").mkdir(parents=True, exist_ok=True)
        (place / "boot" / "vmlinuz").write_text(str(sorted(wanted.items())))

    monkeypatch.setattr(small, "build", build)
    return names


def test_a_kernel_is_built_once_for_the_same_settings(built: list[str], tmp_path: Path) -> None:
    first = kernels.find("base-6.12")
    assert kernels.find("base-6.12") == first
    config = tmp_path / "base.config"
    config.write_text(f"# Why not.\n{config.read_text()}")
    assert kernels.find("base-6.12") == first, "comments are not settings"
    assert built == ["base-6.12"]
    config.write_text("CONFIG_NET=m\n")
    assert kernels.find("base-6.12") != first
    assert built == ["base-6.12"] * 2


def test_debug_overrides_base(built: list[str]) -> None:
    wanted = {
        "CONFIG_KASAN": "y",
        "CONFIG_LOCALVERSION": '"-dmafile-base-6.12-debug"',
        "CONFIG_NET": "n",
    }
    assert kernels.find("base-6.12-debug").image.read_text() == str(sorted(wanted.items()))


def test_a_setting_that_linux_drops_is_an_error() -> None:
    wanted = small.settings('CONFIG_A=y\n# CONFIG_B is not set\n# Prose.\nCONFIG_C="c"\n')
    small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_C="c"\nCONFIG_D=y\n'))
    with pytest.raises(Unavailable, match="CONFIG_A is m, not y"):
        small.compare(wanted, small.settings('CONFIG_A=m\nCONFIG_C="c"\n'))
    with pytest.raises(Unavailable, match="CONFIG_B is y, not n"):
        small.compare(wanted, small.settings('CONFIG_A=y\nCONFIG_B=y\nCONFIG_C="c"\n'))


def test_every_setting_is_given_once() -> None:
    files = sorted(small.CONFIG.glob("*.config"))
    for file in files:
        said = [line for line in file.read_text().splitlines() if small.settings(line)]
        assert len(said) == len(small.settings(file.read_text())), file.name
        assert said, file.name
    used = {file for name in small.NAMES for file in small.parse(name).configs()}
    assert sorted(used) == files


def test_the_parts_of_a_name() -> None:
    assert small.parse("base-6.12") == small.Small("base", "6.12", "")
    debug = small.parse("series-7.3-debug")
    assert [file.stem for file in debug.configs()] == ["base", "debug", "series", "series-debug"]
    large = small.parse("series-6.12-arm64-64k")
    assert (large.variant, large.arch, large.image) == (
        "arm64-64k",
        "arm64",
        "arch/arm64/boot/Image",
    )
    assert small.parse("base-7.3-no-dma-buf").image == "vmlinux"


MAIL = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@example.org>
Date: Sat, 28 Nov 2026 03:20:51 +0000
Subject: [PATCH 1/1] mm: {subject}

Why.
---
{changes}
"""
OLD = """diff --git a/mm/old.c b/mm/old.c
--- a/mm/old.c
+++ b/mm/old.c
@@ -1,3 +1,3 @@
 one
-two
+2
 three
"""
NEW = """diff --git a/mm/new.c b/mm/new.c
new file mode 100644
--- /dev/null
+++ b/mm/new.c
@@ -0,0 +1 @@
+new
"""


def test_a_kernel_of_the_series_is_built_again_for_another_patch(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linux = tmp_path / "linux-source-6.12_1" / "source"
    (linux / "mm").mkdir(parents=True)
    (linux / "mm" / "old.c").write_text("one\ntwo\nthree\n")
    monkeypatch.setattr(series, "SERIES", tmp_path)
    patch = tmp_path / "linux-6.12" / "fixes" / "0001-a.patch"
    patch.parent.mkdir(parents=True)
    (patch.parent / series.COVER).write_text("no patch")
    patch.write_text(MAIL.format(subject="a", changes=OLD + NEW))
    assert (series.files(patch), series.added(patch)) == (["mm/old.c", "mm/new.c"], ["mm/new.c"])
    assert series.message(patch) == "mm: a\n\nWhy."
    first = kernels.find("series-6.12")
    assert kernels.find("series-6.12") == first
    patch.write_text(MAIL.format(subject="b", changes=OLD + NEW))
    assert kernels.find("series-6.12") == first, "the message changes nothing"
    assert built == ["series-6.12"]
    with series.tree("6.12", linux) as tree:
        assert (tree / "mm" / "old.c").read_text() == "one\n2\nthree\n"
        assert (tree / "mm" / "new.c").read_text() == "new\n"
    with series.tree("6.12", linux, []):
        assert (tree / "mm" / "old.c").read_text() == "one\ntwo\nthree\n"
        assert not (tree / "mm" / "new.c").exists()
    with series.tree("6.12", linux):
        assert (tree / "mm" / "old.c").read_text() == "one\n2\nthree\n"
    assert (linux / "mm" / "old.c").read_text() == "one\ntwo\nthree\n", "Debian's stays as it is"
    unchanged = (tree / "mm" / "new.c").stat().st_mtime_ns
    patch.write_text(MAIL.format(subject="a", changes=NEW))
    assert kernels.find("series-6.12") == first
    assert (tree / "mm" / "old.c").read_text() == "one\ntwo\nthree\n"
    assert (tree / "mm" / "new.c").stat().st_mtime_ns == unchanged, "it would be compiled again"
    patch.write_text(MAIL.format(subject="a", changes=OLD))
    assert kernels.find("series-6.12") == first
    assert not (tree / "mm" / "new.c").exists()
    assert built == ["series-6.12"] * 3
