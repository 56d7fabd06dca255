"""Adds stub CUDA libraries to PyTorch, so that its CPU part works without NVIDIA's libraries.

cuda_stubs.py FOLDER      (the folder of torch's libraries; needs readelf and cc)

PyTorch's wheel needs CUDA libraries of several gigabytes, which it does not call without a device.
The stubs define the functions that it refers to, and return 100: cudaErrorNoDevice.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]")
FUNCTION = re.compile(
    r"_*cu(?:[A-Z]|da|blas|dnn|fft|file|File|pti|rand|solver|sparse)"
    r"|nccl|nvrtc|nvJitLink|nvshmem|nvtx"
)
TEXT = re.compile(r"(?!cu[A-Z]).*Get(?:Error|Status)(?:String|Name)|ncclGetLastError")
ALL = "libcudastubs.so"


def readelf(*arguments: str | Path) -> str:
    return subprocess.run(
        ["readelf", "--wide", *arguments], check=True, capture_output=True, text=True
    ).stdout


def symbols(library: Path) -> Iterator[tuple[str, bool]]:
    """The names of the dynamic symbols of a library, and whether it defines them."""
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            yield fields[7].partition("@")[0], fields[6] != "UND"


def shared(folder: Path, name: str, source: Path, *options: str) -> None:
    """Compiles a library."""
    command = ["cc", "-w", "-O1", "-fno-builtin", "-shared", "-fPIC", "-s", f"-Wl,-soname,{name}"]
    subprocess.run([*command, "-o", folder / name, source, *options], check=True)


def main(folder: Path) -> None:
    there = [path for path in folder.iterdir() if ".so" in path.name and path.name != ALL]
    needed: set[str] = set()
    have: set[str] = set()
    want: set[str] = set()
    for library in there:
        needed |= set(LIBRARY.findall(readelf("--dynamic", library)))
        for name, defined in symbols(library):
            (have if defined else want).add(name)
    # Libraries of torch are large; stubs of an earlier run are not.
    needed -= {path.name for path in there if path.stat().st_size > 1 << 20}
    functions = sorted(name for name in want - have if FUNCTION.match(name))
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "stubs.c"
        lines = []
        for name in functions:
            text = TEXT.fullmatch(name)
            kind, value = ("const char *", '"no CUDA"') if text else ("long ", "100")
            lines.append(f"{kind}{name}(void) {{ return {value}; }}\n")
        source.write_text("".join(lines))
        shared(folder, ALL, source)
        # Without symbols of their own: one that is wanted with the version of a library is taken
        # from a library without versions only if that is another one.
        source.write_text("")
        link = ["-Wl,--no-as-needed,-rpath,$ORIGIN", f"-L{folder}", "-lcudastubs"]
        for name in sorted(needed):
            shared(folder, name, source, *link)
    print(f"{len(functions)} functions in {len(needed)} libraries", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
