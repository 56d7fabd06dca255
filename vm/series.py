"""The patches in kernel/linux-VERSION, by topic: applies them to Linux, and keeps them in git.

python3 -m vm.series apply TREE [TOPIC...]    applies topics, with those that they need, or all
python3 -m vm.series tree VERSION FOLDER      makes a git repository with a branch for each topic
python3 -m vm.series patches VERSION FOLDER   writes its branches back to kernel/linux-VERSION

The version of a tree is its own. In a git repository each patch becomes a commit, otherwise
patch(1) is used. The context must match, though it may have moved.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vm.debian import linux_source
from vm.host import ROOT, Unavailable, alone, cache, call, need, replacing

SERIES = ROOT / "kernel"
"""The folder with linux-VERSION/TOPIC/NNNN-subject.patch, as `git format-patch` writes them."""
VERSIONS = ("6.12", "7.3")
TOPICS: Mapping[str, Sequence[str]] = {
    "fixes": (),
    "heap-read": ("fixes",),
    "memory-copy": ("fixes", "heap-read"),
    "buffered-write": ("fixes",),
    "pins": ("fixes",),
    "premap": ("fixes",),
}
"""All topics in the order in which they are applied, and those that each one needs."""
COVER = "0000-cover-letter.patch"
STOCK = "stock"
"""The branch with Debian's source."""
AUTHOR = {"NAME": "dmafile", "EMAIL": "dmafile@example.org"}


def topics(version: str) -> list[str]:
    """The topics that exist for this version, in order."""
    return [name for name in TOPICS if (SERIES / f"linux-{version}" / name).exists()]


def with_needed(names: Sequence[str]) -> list[str]:
    """These topics and those that they need, in order."""
    wanted = {*names, *(one for name in names for one in TOPICS[name])}
    return [name for name in TOPICS if name in wanted]


def patches(version: str, names: Sequence[str] = ()) -> list[Path]:
    """The patches of these topics, or of all, in order."""
    folders = [SERIES / f"linux-{version}" / name for name in names or topics(version)]
    return [path for folder in folders for path in sorted(folder.glob("*.patch")) if is_patch(path)]


def is_patch(path: Path) -> bool:
    return path.name != COVER


def message(patch: Path) -> str:
    """The subject, without the mail's prefix, and the text."""
    header, _, rest = patch.read_text().partition("\n\n")
    subject = re.sub(r"\n ", " ", header).partition("Subject: ")[2].splitlines()[0]
    return re.sub(r"^\[[^]]*\] ", "", subject) + "\n\n" + rest.partition("\n---\n")[0]


def files(patch: Path) -> list[str]:
    """The files that a patch changes or adds."""
    return re.findall(r"^diff --git a/(\S+) b/", patch.read_text(), re.MULTILINE)


def added(patch: Path) -> list[str]:
    """The files that it adds."""
    pattern = r"^diff --git a/(\S+) b/\S+\nnew file"
    return re.findall(pattern, patch.read_text(), re.MULTILINE)


def options(version: str) -> set[str]:
    """The configuration options that the patches add."""
    texts = [patch.read_text() for patch in patches(version)]
    return {f"CONFIG_{name}" for name in re.findall(r"(?m)^\+config (\w+)$", "\n".join(texts))}


def digest(applied: Sequence[Path]) -> str:
    """A digest of what these patches change; their messages do not count."""
    key = hashlib.sha256()
    for patch in applied:
        key.update(patch.read_text().partition("\n---\n")[2].encode())
    return key.hexdigest()


def apply(patch: Path, tree: Path) -> None:
    """Applies a patch to a tree that has at least the files that it changes."""
    need("patch", "command", "-v", "patch")
    # A hunk may have moved in its file, but its context must match (--fuzz=0).
    command = ["patch", "--strip=1", "--fuzz=0", "--silent", "--no-backup-if-mismatch"]
    with patch.open("rb") as text:
        result = subprocess.run(
            [*command, f"--directory={tree}"], stdin=text, capture_output=True, text=True
        )
    if result.returncode:
        raise Unavailable(
            f"{patch.parent.name}/{patch.name} does not apply to this version of Linux; adapt the "
            f"patch:\n{result.stdout}{result.stderr}"
        )


def apply_to(tree: Path, names: Sequence[str]) -> None:
    """Applies these topics, or all, to a tree of Linux of the user."""
    makefile = (tree / "Makefile").read_text() if (tree / "Kbuild").exists() else ""
    numbers = re.findall(r"^(?:VERSION|PATCHLEVEL) = (\d+)$", makefile, re.MULTILINE)
    version = ".".join(numbers)
    there = topics(version)
    if not there:
        raise Unavailable(f"{tree}: no Linux {' or '.join(VERSIONS)}, for which there are patches")
    if unknown := set(names) - set(there):
        raise Unavailable(f"{', '.join(unknown)}: not a topic of {version}: {', '.join(there)}")
    for patch in patches(version, with_needed(names)):
        print(f"{patch.parent.name}/{patch.name}", flush=True)
        if (tree / ".git").exists():
            call(["git", "-C", str(tree), "am", "--quiet", str(patch)])
        else:
            apply(patch, tree)


def originals(linux: Path, tree: Path, applied: Sequence[Path]) -> None:
    """Copies the files that these patches change."""
    for name in {name for patch in applied for name in files(patch)}:
        # Copies, not links: a cached source must not be changed.
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (linux / name).exists():
            shutil.copy(linux / name, target)


@contextlib.contextmanager
def tree(version: str, linux: Path, applied: Sequence[Path] | None = None) -> Iterator[Path]:
    """Yields a tree of Linux in the cache with these patches, or with all; locked.

    It is the same tree each time. Only files that differ are written, so make(1) rebuilds only what
    depends on them.
    """
    applied = patches(version) if applied is None else applied
    place = cache() / "series-source" / linux.parent.name / linux.name
    name = f"series-source-{version}"
    with alone(name), tempfile.TemporaryDirectory(prefix="dmafile-series-") as folder:
        patched = Path(folder)
        originals(linux, patched, applied)
        for patch in applied:
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
    shutil.copy(source, partial)
    partial.replace(target)


def git(folder: Path, *words: str) -> None:
    """Runs git as the author of the patches, with none of the user's settings."""
    need("git", "command", "-v", "git")
    # The date of a commit is its author's, so the same patches give the same commits.
    names = {f"GIT_COMMITTER_{key}": value for key, value in AUTHOR.items()}
    names |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-C", str(folder), *words]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **names})
    if result.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed:\n{result.stdout}{result.stderr}")


def repository(version: str, folder: Path) -> None:
    """Makes a git repository of Linux in FOLDER. Each topic's branch has those that it needs."""
    linux = linux_source(version)
    call(["cp", "--archive", str(linux), str(folder)])
    git(folder, "init", "--quiet", f"--initial-branch={STOCK}")
    git(folder, "add", "--all", "--force")
    author = "{NAME} <{EMAIL}>".format(**AUTHOR)
    subject = f"Debian {linux.parent.name.replace('_', ' ')}"
    git(folder, "commit", "--quiet", f"--author={author}", f"--message={subject}")
    for topic in topics(version):
        base = TOPICS[topic][-1] if TOPICS[topic] else STOCK
        git(folder, "checkout", "--quiet", "-b", topic, base)
        am = ["am", "--quiet", "--committer-date-is-author-date"]
        git(folder, *am, *map(str, patches(version, [topic])))


def save(version: str, folder: Path) -> list[Path]:
    """Writes the branches of a repository back as patches; the cover letters stay as they are."""
    written = []
    for topic, needed in TOPICS.items():
        place = SERIES / f"linux-{version}" / topic
        branch = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--quiet", "--verify", topic],
            stdout=subprocess.DEVNULL,
        )
        if branch.returncode:
            continue
        place.mkdir(parents=True, exist_ok=True)
        for path in place.glob("*.patch"):
            if is_patch(path):
                path.unlink()
        base = needed[-1] if needed else STOCK
        # Nothing that depends on when, or by which git, this is run.
        words = ["--quiet", "--zero-commit", "--no-signature", "--abbrev=12", "--numbered"]
        git(folder, "format-patch", *words, "--output-directory", str(place), f"{base}..{topic}")
        written += patches(version, [topic])
    return written


def main() -> None:
    command, *words = sys.argv[1:] or [""]
    try:
        if command == "apply" and words:
            apply_to(Path(words[0]), words[1:])
        elif command == "tree" and len(words) == 2 and words[0] in VERSIONS:
            repository(words[0], Path(words[1]).absolute())
        elif command == "patches" and len(words) == 2 and words[0] in VERSIONS:
            for path in save(words[0], Path(words[1]).absolute()):
                print(path)
        else:
            sys.exit(__doc__)
    except Unavailable as error:
        sys.exit(f"vm: {error}")


if __name__ == "__main__":
    main()
