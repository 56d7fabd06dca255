"""The site of `make docs`, where its tools are installed."""

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts import site

LINK = re.compile(r'\b(?:href|src)="([^"]*)"')


def test_the_site_can_be_read_from_the_disk(tmp_path: Path) -> None:
    for tool in ("mkdocs", "pdoc"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: make docs")
    rustdoc, out = tmp_path / "doc", tmp_path / "site"
    (rustdoc / "dmafile").mkdir(parents=True)
    (rustdoc / "dmafile/index.html").write_text("")
    site.main(Path(sys.executable).with_name("dmafile"), rustdoc, out)
    # pdoc's pages are theirs; the page for missing ones is for servers.
    own = (page for page in out.rglob("*.html") if not page.is_relative_to(out / "api/python"))
    pages = [page for page in own if page != out / "404.html"]
    assert {"index.html", "command.html", "docs/python.html"} <= {
        str(page.relative_to(out)) for page in pages
    }
    for page in pages:
        for link in LINK.findall(page.read_text()):
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc and parts.path:
                target = page.parent / unquote(parts.path)
                # A browser shows a folder of the disk as a list of files.
                assert target.is_file(), f"{page}: {link}"
