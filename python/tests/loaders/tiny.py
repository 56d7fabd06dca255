"""Models of a few layers with random weights, in two shards, and the files that their readers need.

python3 tiny.py FOLDER      (needs numpy, safetensors and, for a tokenizer, tokenizers)
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

HEAD = 32
VOCABULARY = 512
SHARDS = 2


def llama(folder: Path, layers: int = 2, hidden: int = 128, tied: bool = False) -> Path:
    """Writes a Llama; with `tied` weights there is no `lm_head`."""
    folder.mkdir(parents=True, exist_ok=True)
    heads, groups, inner = hidden // HEAD, max(2, hidden // 2 // HEAD), 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": HEAD,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    random = np.random.default_rng(7)

    def weight(*shape: int) -> NDArray[Any]:
        made: NDArray[Any] = random.standard_normal(shape) / np.sqrt(shape[-1])
        return made.astype(np.float32)

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    if not tied:
        weights["lm_head.weight"] = 4 * weight(VOCABULARY, hidden)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * HEAD, hidden),
            "self_attn.k_proj": (groups * HEAD, hidden),
            "self_attn.v_proj": (groups * HEAD, hidden),
            "self_attn.o_proj": (hidden, heads * HEAD),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": weight(*shapes[name]) for name in shapes}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    places: dict[str, str] = {}
    names = sorted(weights)
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        some = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        chosen = {name: weights[name] for name in some}
        safetensors.numpy.save_file(chosen, folder / file, {"format": "pt"})
        places |= dict.fromkeys(some, file)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write(folder / "model.safetensors.index.json", index)
    return folder


def tokenizer(folder: Path) -> None:
    """Writes a tokenizer of this vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 512,
    }
    _write(folder / "tokenizer_config.json", said)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


if __name__ == "__main__":
    tokenizer(llama(Path(sys.argv[1])))
