"""Writes the tensors of a safetensors file in another format, with that format's library.

convert.py SOURCE TARGET    TARGET.gguf, .pt or .tensors
"""

import sys
from pathlib import Path


def write_gguf(source: Path, path: Path) -> None:
    import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from safetensors.numpy import load_file

    writer = GGUFWriter(path, "llama")
    for name, tensor in load_file(source).items():
        writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_pt(source: Path, path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(source), path)


def write_tensors(source: Path, path: Path) -> None:
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    writer = TensorSerializer(str(path))
    writer.write_state_dict(load_file(source))
    writer.close()


def main() -> None:
    source, path = map(Path, sys.argv[1:])
    write = {".gguf": write_gguf, ".pt": write_pt, ".tensors": write_tensors}[path.suffix]
    partial = path.with_name(f"{path.name}.partial")
    write(source, partial)
    partial.rename(path)


if __name__ == "__main__":
    main()
