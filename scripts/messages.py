"""Prints all messages of the command and the libraries: `python -m scripts.messages`.

The output is FILE:LINE: TEXT for each string with words in their sources: errors with reasons and
remedies, reasons of plans, reports, help. `{}` stands for a value.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUST = ("crates/*/src", "python/src")
PYTHON = ("python/dmafile",)
ARGUMENTS = ROOT / "crates/cli/src/args.rs"

STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
SKIPPED = re.compile(
    r"//[^\n]*"  # comments
    r"|'(?:\\.|[^'\\])'"  # characters
    r'|\.expect\(\s*"(?:[^"\\]|\\.)*"',  # messages of panics
    re.DOTALL,
)
CONTINUED = re.compile(r"\\\n\s*")
WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z{]|: [a-z{]")


@dataclass(frozen=True)
class Message:
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.text}"


def messages() -> Iterator[Message]:
    for file in sources(RUST, "*.rs"):
        if file.name != "tests.rs":
            yield from of_rust(file)
    for file in sources(PYTHON, "*.py"):
        yield from of_python(file)


def sources(folders: tuple[str, ...], pattern: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(ROOT.glob(f"{folder}/**/{pattern}"))


def of_rust(file: Path) -> Iterator[Message]:
    text, _, _ = file.read_text().partition("#[cfg(test)]")
    if file == ARGUMENTS:
        # Its documentation comments are the help texts.
        text = re.sub(r"(?m)^( *)/// (.*)$", r'\1"\2"', text)
    strings = re.compile(f"{SKIPPED.pattern}|(?P<string>{STRING.pattern})", re.DOTALL)
    for found in strings.finditer(text):
        if (string := found["string"]) and WORDS.search(string):
            line = text.count("\n", 0, found.start()) + 1
            yield Message(file, line, CONTINUED.sub("", string[1:-1]))


def of_python(file: Path) -> Iterator[Message]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        match node:
            case ast.JoinedStr():
                text = "".join(map(text_of, node.values))
            case ast.Constant(value=str()) if not {node} & (documentation | parts):
                text = text_of(node)
            case _:
                continue
        if WORDS.search(text):
            yield Message(file, node.lineno, text)


def text_of(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


if __name__ == "__main__":
    for message in messages():
        print(message)
