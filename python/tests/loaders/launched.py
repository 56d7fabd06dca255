"""A rank that torchrun has started: launched.py MODEL FOLDER. It loads the model twice. Rank 0 is
killed when half of it has been read for the second time. Each rank writes its results to FOLDER.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import dmafile.torch
import torch
import torch.distributed as dist


def main(model: str, folder: Path) -> None:
    # When a rank has died, torchrun ends the others, which still have to write.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    me = dist.get_rank()
    reports: list[dict[str, Any]] = []
    tensors = dmafile.torch.load_file(model, group=dist.group.WORLD, report=reports.append)
    said: dict[str, Any] = {
        "digests": {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()
            for name, tensor in tensors.items()
        },
        "reports": reports,
    }
    # Otherwise it would be taken from the ranks that still have it.
    del tensors
    dist.barrier()

    def progress(done: int, total: int) -> None:
        if 2 * done >= total:
            (folder / f"{me}.json").write_text(json.dumps(said))
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        dmafile.torch.load_file(model, group=dist.group.WORLD, progress=progress)
    except dmafile.Error as error:
        said["error"] = str(error)
    (folder / f"{me}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
