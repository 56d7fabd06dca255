"""Builds the site of the documentation: `python -m scripts.site COMMAND RUSTDOC OUT`.

COMMAND is the built dmafile; its help becomes a page. RUSTDOC is the folder of `cargo doc`. OUT is
the folder of the site, which is replaced. The pages are the Markdown files of the repository, with
the files that they link to.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/*.md", "kernel/**/*.md", "vm/*.md", "tests/vm/*.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
API = {"rust": "dmafile/index.html", "python": "dmafile.html"}
"""The start page of each API, in the folder api/NAME of the site."""


def main(command: Path, rustdoc: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder)
        for pattern in PAGES:
            for file in sorted(ROOT.glob(pattern)):
                add_page(file, pages)
        (pages / "command.md").write_text(help_of(command))
        add_api(pages)
        build = ("mkdocs", "build", "--quiet", "--strict", "--config-file", "-", "--clean")
        config = (ROOT / "mkdocs.yml").read_text() + f"docs_dir: {pages}\nsite_dir: {out}\n"
        run(sys.executable, "-m", *build, text=config)
    # Rustdoc's pages link to each other, so its folder is copied unchanged.
    shutil.copytree(rustdoc, out / "api" / "rust", dirs_exist_ok=True)
    run(sys.executable, "-m", "pdoc", "--output-directory", str(out / "api" / "python"), "dmafile")


def run(*words: str, text: str = "") -> str:
    done = subprocess.run(words, input=text, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def add_page(file: Path, pages: Path) -> None:
    """Copies a Markdown file, and the files that it links to, to their places; each once."""
    place = pages / file.relative_to(ROOT)
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text()
    place.write_text(LINK.sub(lambda link: linked(link, file), text))
    for link in LINK.finditer(text):
        target = target_of(link, file)
        if target is None:
            continue
        if target.suffix == ".md":
            add_page(target, pages)
        elif target.is_file():
            copy = pages / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)


def target_of(link: re.Match[str], file: Path) -> Path | None:
    """The file or folder of the repository that a link points to."""
    target = (file.parent / link[3]).resolve()
    if "://" in link[3] or not target.exists() or not target.is_relative_to(ROOT):
        return None
    readme = target / "README.md"
    return readme if readme.exists() else target


def linked(link: re.Match[str], file: Path) -> str:
    """A link for the site. A link to a folder points to its README; without one it becomes text."""
    target = target_of(link, file)
    if target is None or not (file.parent / link[3]).is_dir():
        return link[0]
    if target.is_dir():
        return link[2]
    return f"{link[1]}[{link[2]}]({link[3].rstrip('/')}/README.md{link[4] or ''})"


def help_of(command: Path) -> str:
    """The help of the command and of each of its subcommands."""
    short = run(str(command), "--help")
    listed = re.search(r"(?s)Commands:\n(.*?)\n\n", short)
    assert listed, short
    names = re.findall(r"(?m)^  (\w+) ", listed[1])
    parts = ["# The command\n", fenced(short)]
    for name in names:
        if name != "help":
            parts += [f"\n## dmafile {name}\n", fenced(run(str(command), name, "--help"))]
    return "\n".join(parts)


def add_api(pages: Path) -> None:
    api = pages / "api"
    api.mkdir()
    for name, start in API.items():
        link = f'<a href="{name}/{start}">The {name.capitalize()} API</a>'
        (api / f"{name}.md").write_text(f"# {name.capitalize()}\n\n{link}\n")
    header = (ROOT / "crates" / "capi" / "include" / "dmafile.h").read_text()
    (api / "c.md").write_text(f"# dmafile.h\n\n{fenced(header, 'c')}")


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
