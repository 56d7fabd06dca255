"""Greedy tokens of a model in vLLM: generate.py FOLDER OPTIONS, the options of LLM() as JSON. Each
process that loads weights with dmafile prints how many bytes it has read from the disk for them.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dmafile.torch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


stream = dmafile.torch.stream


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def counted(*args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    before = read_bytes()
    yield from stream(*args, **options)
    print("READ", read_bytes() - before, flush=True)


# Here, because the processes of vLLM import this module, too, and the load format after it.
module: Any = dmafile.torch
module.stream = counted


def main(folder: str, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    small = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    model = LLM(model=folder, dtype="float32", **small, **options)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    done = model.generate(["import json", "def llama(folder"], greedy)
    print("TOKENS", [list(one.outputs[0].token_ids) for one in done], flush=True)


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main(sys.argv[1], json.loads(sys.argv[2]))
