"""Greedy tokens of a model in vLLM: generate.py FOLDER OPTIONS, the options of LLM() as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


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
