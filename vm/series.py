"""The series of kernel/linux-6.12: applied to Linux, and written as mails.

python3 -m vm.series FOLDER    the mails, one a patch, as `git format-patch` writes them
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
    """One step: a message, files that are new, and changes of those that are there."""

    name: str
    message: str
    new: Sequence[str]
    hooks: str

    @property
    def changed(self) -> list[str]:
        """What of Linux is changed."""
        lines = self.hooks.splitlines()
        return [line.removeprefix("--- a/") for line in lines if line.startswith("--- a/")]


def patches() -> list[Patch]:
    """All of them, in their order."""
    return [read(path) for path in sorted((SERIES / HOOKS).glob("*.patch"))]


def read(path: Path) -> Patch:
    message, _, rest = path.read_text().partition("---\n")
    new, lines = [], rest.splitlines(keepends=True)
    while lines and lines[0].startswith("new: "):
        new.append(lines.pop(0).removeprefix("new: ").strip())
    return Patch(path.name, message.removeprefix("Subject: "), new, "".join(lines))


def digest(steps: int | None = None) -> str:
    """Changes when anything of the series, or of its first steps, does."""
    key = hashlib.sha256()
    for patch in patches()[:steps]:
        key.update(f"{patch}".encode())
        for name in patch.new:
            key.update((SERIES / NEW / name).read_bytes())
    return key.hexdigest()


def apply(patch: Patch, tree: Path) -> None:
    """Makes one step in a tree that has at least what it changes."""
    for name in patch.new:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SERIES / NEW / name, target)
    if not patch.hooks:
        return
    need("patch", "command", "-v", "patch")
    # Elsewhere in a file is all right, other lines around it are not.
    command = ["patch", "--strip=1", "--fuzz=0", "--silent", "--no-backup-if-mismatch"]
    result = subprocess.run(
        [*command, f"--directory={tree}"], input=patch.hooks, capture_output=True, text=True
    )
    if result.returncode:
        raise Unavailable(
            f"{patch.name} does not apply to this Linux; what it changes there has to be looked "
            f"at again:\n{result.stdout}{result.stderr}"
        )


def originals(linux: Path, tree: Path) -> None:
    """Copies what the series changes."""
    for name in {name for patch in patches() for name in patch.changed}:
        # Of the files themselves: nothing may be written to a cached source.
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linux / name, target)


@contextlib.contextmanager
def tree(linux: Path, steps: int | None = None) -> Iterator[Path]:
    """Linux with the series, or with its first steps, in the cache, while nobody changes it.

    It's always the same tree for a Linux, in which only what differs is written: so that only what
    depends on it is built again.
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
    """Another file in the place of one that may be a link to the cached source's."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def mails(linux: Path, folder: Path) -> list[Path]:
    """Writes one a patch, against this Linux."""
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
