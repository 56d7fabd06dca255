"""Servers on held weights, which are frozen and thawed: for each line of input they print the next
answer as JSON, a result that depends on all answers before.

serving.py llama MODEL                  llama.cpp (xllamacpp) on a file
serving.py torch held:NAME@SOCKET       numpy and torch
serving.py transformers held:NAME@...   a model, configured by $CONFIG
serving.py vllm FOLDER                  vLLM's CPU build, with its engine in this process
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[int], object]


def llama(model: str) -> Answer:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 64, 1, False, 1
    server = xllamacpp.Server(params)
    said = ["hello"]

    def answer(_: int) -> object:
        asked = {"prompt": said[-1], "max_tokens": 6, "temperature": 0.0, "cache_prompt": False}
        done: Any = server.handle_completions(asked)
        done = done if isinstance(done, dict) else json.loads(done)
        said.append(done["choices"][0]["text"][:20] or "again")
        return said[-1]

    return answer


def torch(model: str) -> Answer:
    import dmafile.torch
    import numpy as np
    import torch

    tensors = dmafile.torch.load_file(model)
    arrays = dmafile.numpy.load_file(model)
    names = sorted(tensors)
    state = torch.ones(tensors[names[0]].shape[-1])

    def answer(number: int) -> object:
        nonlocal state
        name = names[number % len(names)]
        state = torch.tanh(tensors[name].T @ torch.tanh(tensors[name] @ state))
        row = np.asarray(arrays[name][number], dtype=np.float64)
        return [state.double().sum().item(), float(row @ row)]

    return answer


def transformers(model: str) -> Answer:
    import dmafile.torch
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**json.loads(os.environ["CONFIG"]))
    weights = dmafile.torch.load_file(model)
    one = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    tokens = torch.tensor([[1, 2, 3]])

    def answer(_: int) -> object:
        nonlocal tokens
        tokens = one.generate(tokens, max_new_tokens=4, do_sample=False)[:, -12:]
        return tokens.tolist()

    return answer


def vllm(model: str) -> Answer:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # Of several processes, each on CPUs of its own, only one is frozen.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    small = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    one = LLM(model=model, dtype="float32", load_format="dmafile", **small)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    said = "import json"

    def answer(_: int) -> object:
        nonlocal said
        [done] = one.generate([said], greedy, use_tqdm=False)
        said = done.outputs[0].text[-20:] or "again"
        return list(done.outputs[0].token_ids)

    return answer


def main(kind: str, model: str) -> None:
    kinds = {"llama": llama, "torch": torch, "transformers": transformers, "vllm": vllm}
    answer: Answer = kinds[kind](model)
    print("ready", flush=True)
    number = 0
    history = hashlib.sha256()
    while sys.stdin.readline():
        said = answer(number)
        history.update(json.dumps(said).encode())
        number += 1
        print(json.dumps([number, said, history.hexdigest()[:12]]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
