"""Counts the instructions of reads that drop what they bring into the page cache (RWF_DONTCACHE).

One machine with Debian's newest kernel, and two files on ext4: one that the kernel caches in large
folios, and a journalled one, which is cached in single pages and does not support direct reads.
docs/tuning.md has the results.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runs import RESULTS, ROOT, Rows, Run
from bench.words import spread, table, thousands
from vm.compiled import static

MIB = 1 << 20
FILES = {"plain": "large folios", "journalled": "single pages"}
SHOWN = 4 * MIB
"""The block size in the table; the samples have others, too."""
WAYS = {
    "kept": "stay",
    "kept,dropped-at-the-end": "stay, dropped at the end",
    "dropped": "dropped",
    "dropped,no-read-ahead": "dropped, no read-ahead",
}

INSIDE = """
cp "$1" /tmp/dropping
# With delayed allocation ext4 ignores the file flag for journalled data.
disk=$(findmnt -no SOURCE /mnt)
umount /mnt
mount -o nodelalloc $disk /mnt
cd /mnt && touch plain journalled && chattr +j journalled
for file in plain journalled; do head -c $3M /dev/urandom >$file; done
sync
echo about $(uname -r) >&2
exec /tmp/dropping "$2" plain journalled
"""


def measure(mib: int, rounds: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="dmafile-dropping-") as name:
        marks = Path(name) / "marks"
        program = static(ROOT / "bench/dropping.c", Path(name), "-Wextra")
        command = [str(ROOT / "vm/run"), "--kernel=newest", "--marks", str(marks), "--fs=ext4"]
        command += ["--timeout=3600", "--", "sh", "-ec", INSIDE, "sh", str(program)]
        result = subprocess.run([*command, str(rounds), str(mib)], capture_output=True, text=True)
        if result.returncode:
            sys.exit(result.stderr)
        lines = list(samples(result.stdout.splitlines(), marks.read_text().splitlines()))
    guest = re.search(r"^about (.*)$", result.stderr, re.MULTILINE)
    assert guest is not None, result.stderr
    machine = {"date": datetime.date.today().isoformat(), "guest": guest[1], "mib": mib}
    return Run({"bench": "dropping", "machine": machine}, lines)


def samples(said: Sequence[str], marks: Sequence[str]) -> Iterator[dict[str, Any]]:
    lines = [list(map(int, line.split())) for line in marks]
    counts = [user + kernel for number, user, kernel in lines if number < 2]
    for line, begun, done in zip(said, counts[::2], counts[1::2], strict=True):
        _, file, way, *figures = line.split()
        threads, block, left, came = map(int, figures)
        one = {"file": file, "way": way, "threads": threads, "block": block}
        yield {**one, "instructions": done - begun, "pages_left": left, "bytes_read": came}


def tables(run: Run) -> dict[str, Rows]:
    mib = run.machine["machine"]["mib"]
    rows = []
    keys = [(one["file"], one["way"], one["threads"], one["block"]) for one in run.samples]
    for file, way, threads, block in sorted(set(keys), key=in_order):
        if block != SHOWN:
            continue
        mine = [
            one
            for one, key in zip(run.samples, keys, strict=True)
            if key == (file, way, threads, block)
        ]
        row = [FILES[file], WAYS[way], str(threads), thousands([of(one, mib) for one in mine])]
        row.append(spread([one["pages_left"] * 4096 / MIB for one in mine], 1))
        row.append(spread([one["bytes_read"] / (mib * MIB) for one in mine]))
        rows.append(row)
    head = ["file in", "pages", "threads", "thousand instructions a MiB"]
    return {"dropping": ([*head, "MiB left in the page cache", "read, to the file"], rows)}


def of(sample: Mapping[str, Any], mib: int) -> float:
    return float(sample["instructions"]) / mib / 1000


def in_order(key: tuple[str, str, int, int]) -> tuple[int, int, int, int]:
    file, way, threads, block = key
    return list(FILES).index(file), list(WAYS).index(way), threads, block


def main() -> None:
    parser = argparse.ArgumentParser(prog="dropping", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of each file [64]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write to {RESULTS.relative_to(ROOT)} and docs/tuning.md [to .bench]",
    )
    args = parser.parse_args()
    run = measure(args.mib, args.rounds)
    print(table(*tables(run)["dropping"]))
    date = run.machine["machine"]["date"]
    # Imported here because documents imports this module.
    from bench import documents

    print(f"All runs: {documents.written(run, date, 'dropping', args.keep)}")


if __name__ == "__main__":
    main()
