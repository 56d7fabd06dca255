"""What the tests of several files store, and how they compare it."""

import hashlib
import json
import random

from tests.stores.conftest import Done
from tests.stores.servers import SECRET

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def safetensors(seed: int, *names: str) -> bytes:
    """A file with tensors of these names, whose sizes are odd."""
    header, at = {}, 0
    for number, name in enumerate(names):
        size = 100_003 + 777 * number
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + noise(at, seed)


def refused(done: Done, errno: str, url: str) -> None:
    """It ends with one line that names the object and the errno, and no secret."""
    assert done.status == 1, done
    assert done.out == "" and done.err.count("\n") == 1, done
    assert f"({errno})" in done.err and url in done.err, done
    assert SECRET not in done.err, done
