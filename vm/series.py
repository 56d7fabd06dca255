"""Applies the series of kernel/linux-6.12 to Linux, and writes it as mails.

python3 -m vm.series FOLDER    writes one mail for each patch, as `git format-patch` does
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vm.debian import linux_source
from vm.host import ROOT, Unavailable, alone, cache, call, need, replacing

SERIES = ROOT / "kernel" / "linux-6.12"
NEW, HOOKS = "new", "hooks"
AUTHOR = {"NAME": "dmafile", "EMAIL": "dmafile@example.org"}


@dataclass(frozen=True)
class Patch:
    """One patch: a message, new files, and changes of existing files."""

    name: str
    message: str
    new: Sequence[str]
    hooks: str

    @property
    def changed(self) -> list[str]:
        """The existing files of Linux that it changes."""
        lines = self.hooks.splitlines()
        return [line.removeprefix("--- a/") for line in lines if line.startswith("--- a/")]


def patches() -> list[Patch]:
    """All patches, in order."""
    return [read(path) for path in sorted((SERIES / HOOKS).glob("*.patch"))]


def read(path: Path) -> Patch:
    message, _, rest = path.read_text().partition("---\n")
    new, lines = [], rest.splitlines(keepends=True)
    while lines and lines[0].startswith("new: "):
        new.append(lines.pop(0).removeprefix("new: ").strip())
    return Patch(path.name, message.removeprefix("Subject: "), new, "".join(lines))


def digest(steps: int | None = None) -> str:
    """A digest of the series, or of its first STEPS patches."""
    key = hashlib.sha256()
    for patch in patches()[:steps]:
        key.update(f"{patch}".encode())
        for name in patch.new:
            key.update((SERIES / NEW / name).read_bytes())
    return key.hexdigest()


def apply(patch: Patch, tree: Path) -> None:
    """Applies a patch to a tree that has at least the files that it changes."""
    for name in patch.new:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SERIES / NEW / name, target)
    if not patch.hooks:
        return
    need("patch", "command", "-v", "patch")
    # A hunk may have moved in its file, but its context must match (--fuzz=0).
    command = ["patch", "--strip=1", "--fuzz=0", "--silent", "--no-backup-if-mismatch"]
    result = subprocess.run(
        [*command, f"--directory={tree}"], input=patch.hooks, capture_output=True, text=True
    )
    if result.returncode:
        raise Unavailable(
            f"{patch.name} does not apply to this version of Linux; adapt the patch:\n"
            f"{result.stdout}{result.stderr}"
        )


def originals(linux: Path, tree: Path) -> None:
    """Copies the files that the series changes."""
    for name in {name for patch in patches() for name in patch.changed}:
        # Copies, not links: a cached source must not be changed.
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linux / name, target)


@contextlib.contextmanager
def tree(linux: Path, steps: int | None = None) -> Iterator[Path]:
    """Yields a tree of Linux in the cache with the series, or its first STEPS patches; locked.

    It is the same tree each time. Only files that differ are written, so make(1) rebuilds only what
    depends on them.
    """
    place = cache() / "series-source" / linux.parent.name / linux.name
    with alone("series-source"), tempfile.TemporaryDirectory(prefix="dmafile-series-") as name:
        patched = Path(name)
        originals(linux, patched)
        for patch in patches()[:steps]:
            apply(patch, patched)
        if not place.exists():
            with replacing(place) as partial:
                partial.rmdir()
                call(["cp", "--archive", "--link", str(linux), str(partial)])
        wanted = {path.relative_to(patched) for path in patched.rglob("*") if path.is_file()}
        list_of = place.parent / "applied"
        before = set(map(Path, list_of.read_text().splitlines() if list_of.exists() else ()))
        list_of.write_text("".join(f"{one}\n" for one in sorted(wanted | before)))
        for one in before - wanted:
            restore(linux / one, place / one)
        for one in wanted:
            write(patched / one, place / one)
        list_of.write_text("".join(f"{one}\n" for one in sorted(wanted)))
        yield place


def restore(source: Path, target: Path) -> None:
    if source.exists():
        write(source, target)
    else:
        target.unlink(missing_ok=True)


def write(source: Path, target: Path) -> None:
    """Replaces a file, which may be a hard link to one of the cached source."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def mails(linux: Path, folder: Path) -> list[Path]:
    """Writes one mail for each patch, against this version of Linux."""
    need("git", "command", "-v", "git")
    with tempfile.TemporaryDirectory(prefix="dmafile-series-") as name:
        repository = Path(name)
        environment = dict(os.environ, HOME=name)
        for who in ("AUTHOR", "COMMITTER"):
            environment |= {f"GIT_{who}_{key}": value for key, value in AUTHOR.items()}

        def git(*words: str, message: str | None = None) -> None:
            command = ["git", "-C", name, *words]
            subprocess.run(command, input=message, text=True, check=True, env=environment)

        originals(linux, repository)
        git("init", "--quiet")
        git("add", "--all")
        git("commit", "--quiet", "--message=Linux")
        for patch in patches():
            apply(patch, repository)
            git("add", "--all", "--force")
            git("commit", "--quiet", "--file=-", message=patch.message)
        count = f"-{len(patches())}"
        git("format-patch", "--quiet", count, "--output-directory", str(folder))
    return sorted(folder.glob("*.patch"))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 -m vm.series FOLDER")
    try:
        for path in mails(linux_source(), Path(sys.argv[1]).absolute()):
            print(path)
    except Unavailable as error:
        sys.exit(f"vm: {error}")


if __name__ == "__main__":
    main()
