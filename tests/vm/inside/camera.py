"""Frames of vivid are recorded as drawn, in buffers of the program and of the driver.

camera.py RECORD_CAMERA FOLDER    in the machine, as root
"""

import fcntl
import hashlib
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
WIDTH, HEIGHT = 1280, 720
FRAME = WIDTH * HEIGHT * 2
"""Two bytes a pixel: YUYV, vivid's default."""
FRAMES = 8
"""Each of four buffers is filled twice."""

# linux/videodev2.h
VIDIOC_G_FMT = 0xC0D05604
VIDIOC_S_FMT = 0xC0D05605
VIDIOC_S_CTRL = 0xC008561C
CAPTURE = 1
# drivers/media/test-drivers/vivid/vivid-ctrls.c
OSD_TEXT_MODE = 0x00F0F001
ALL, NONE = 0, 2
RUNS: Sequence[tuple[str, int, Sequence[str]]] = (
    # Frames in memfds must be written without a copy; buffers of the driver may be copied.
    ("import", ALL, ("--method", "uring")),
    ("import", NONE, ()),
    ("export", ALL, ()),
    ("export", NONE, ()),
)

Record = tuple[int, int, int, int, int, int, int, int, bytes]


def reader() -> Callable[[str], Iterator[Record]]:
    """The reader in docs/recording.md."""
    text = (ROOT / "docs" / "recording.md").read_text()
    names: dict[str, Callable[[str], Iterator[Record]]] = {"__name__": "reader"}  # type: ignore[dict-item]
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], names)
    return names["records"]


def larger_frames(device: str) -> None:
    """Sets larger frames; the node keeps its format when it is closed."""
    form = bytearray(208)
    struct.pack_into("<I", form, 0, CAPTURE)
    with Path(device).open("r+b", buffering=0) as video:
        fcntl.ioctl(video, VIDIOC_G_FMT, form)
        struct.pack_into("<II", form, 8, WIDTH, HEIGHT)
        fcntl.ioctl(video, VIDIOC_S_FMT, form)
    assert struct.unpack_from("<II", form, 8) == (WIDTH, HEIGHT)


def text_in_picture(device: str, mode: int) -> None:
    with Path(device).open("r+b", buffering=0) as video:
        fcntl.ioctl(video, VIDIOC_S_CTRL, struct.pack("<Ii", OSD_TEXT_MODE, mode))


def drawn(device: str) -> bytes:
    """A frame from read(2), without dmafile."""
    with Path(device).open("rb", buffering=0) as video:
        data = video.read(FRAME)
    assert data is not None and len(data) == FRAME
    return data


def main(program: str, folder: str) -> None:
    subprocess.run(
        ["modprobe", "vivid", "n_devs=1", "node_types=0x1", "num_inputs=1", "input_types=0"],
        check=True,
    )
    device = "/dev/video0"
    larger_frames(device)
    records = reader()
    count = 0
    for way, mode, words in RUNS:
        text_in_picture(device, mode)
        name = f"{way}-{mode}"
        recording, frames = Path(folder) / f"{name}.rec", Path(folder) / name
        frames.mkdir()
        command = [program, device, str(FRAMES), str(recording), way]
        command += [*words, "--frames", str(frames)]
        subprocess.run(command, check=True)
        all_of_it = list(records(str(recording)))
        tags = [record[4] for record in all_of_it]
        assert len(tags) == FRAMES and tags == sorted(set(tags)), tags
        times = [record[3] for record in all_of_it]
        assert times == sorted(set(times)), times
        for record in all_of_it:
            assert len(record[8]) == FRAME, record[:8]
            # The frame as the program saw it before it returned the buffer to the camera.
            assert record[8] == (frames / str(record[4])).read_bytes(), (name, record[:8])
        different = {hashlib.sha256(record[8]).digest() for record in all_of_it}
        # The text in the picture has the number of the frame.
        assert len(different) == (FRAMES if mode == ALL else 1), (name, len(different))
        if mode == NONE:
            assert all_of_it[0][8] == drawn(device), name
        count += len(all_of_it)
    print(f"{count} frames checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
