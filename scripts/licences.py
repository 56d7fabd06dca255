"""Writes the licences of what the binaries contain: `python -m scripts.licences CARGO-ABOUT FILE`.

cargo-about finds the texts of crates, and refuses licences that packaging/about.toml does not list.
It does not distinguish linked crates from macros, which only the compiler runs; `cargo tree` does.
The notices of the standard library come with Rust.
"""

import html
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "packaging" / "about.toml"
RULE = "-" * 100
WITHOUT_FILES = {"aya-obj", "core-error"}
"""Crates that offer MIT or Apache-2.0, and have no file with either: the text of the second names
nobody, and is the same everywhere."""
HEAD = """\
The binaries of dmafile (the command, the C library, the Python extension) contain the following
crates, and Rust's standard library. Their licences and copyright notices are below. Wheels also
contain LLVM's libunwind, under Apache-2.0 WITH LLVM-exception. The licence of dmafile itself is not
part of this file.
"""


def main(tool: str, file: str) -> int:
    config = tomllib.loads(CONFIG.read_text())
    crates = {crate for target in config["targets"] for crate in linked(target)}
    found = json.loads(run(*about(tool)))["licenses"]
    notices = Path(
        run("rustc", "--print", "sysroot").strip(), "share/doc/rust/COPYRIGHT-library.html"
    )
    if not notices.is_file():
        raise SystemExit(f"licences: {notices} is missing; it is part of Rust from rustup")
    clarified = {
        name: set(entry["clarify"]["license"].split(" AND "))
        for name, entry in config.items()
        if isinstance(entry, dict) and "clarify" in entry
    }
    own = attributions(crates)
    Path(file).write_text(document(crates, found, notices.read_text(), clarified, own))
    print(f"licences: of {len(crates)} crates and Rust's standard library, in {file}")
    return 0


def about(tool: str) -> list[str]:
    # Without --frozen it asks a web service for texts, whose answers change.
    options = [
        "--workspace",
        "--all-features",
        "--frozen",
        "--fail",
        "--format",
        "json",
        "--config",
        str(CONFIG),
    ]
    return [tool, "about", "generate", *options]


def linked(target: str) -> set[str]:
    """The crates in the binaries for this target, as `name version`."""
    # What tests share is in no binary.
    tree = ["cargo", "tree", "--workspace", "--exclude", "dmafile-testkit", "--all-features"]
    tree += ["--frozen", "--prefix", "none", "--target", target]
    lines = run(*tree, "--edges", "normal,no-proc-macro", "--format", "{p}").splitlines()
    # Crates of this repository are listed with their folder, and separated by empty lines.
    others = (line.split() for line in lines if line and " (/" not in line)
    return {f"{name} {version.removeprefix('v')}" for name, version, *_ in others}


def attributions(crates: set[str]) -> dict[str, str]:
    """The file NOTICE of each crate that has one: Apache-2.0 demands that it is passed on."""
    metadata = json.loads(run("cargo", "metadata", "--frozen", "--format-version", "1"))
    found: dict[str, str] = {}
    for package in metadata["packages"]:
        crate = f"{package['name']} {package['version']}"
        for path in sorted(Path(package["manifest_path"]).parent.glob("NOTICE*")):
            if crate in crates:
                found[crate] = found.get(crate, "") + path.read_text()
    return found


def document(
    crates: set[str],
    found: list[dict[str, Any]],
    notices: str,
    clarified: dict[str, set[str]],
    attributions: dict[str, str],
) -> str:
    """From what cargo-about has found, the files NOTICE, and the page of Rust about its standard
    library."""
    texts: list[tuple[str, list[str], str]] = []
    names: dict[str, set[str]] = {crate: set() for crate in crates}
    faults = []
    apache = next((plain(one["text"]) for one in found if one["id"] == "Apache-2.0"), None)
    for licence in found:
        name, text = licence["id"], plain(licence["text"])
        users = crates & {
            f"{user['crate']['name']} {user['crate']['version']}" for user in licence["used_by"]
        }
        without = {user for user in users if user.split()[0] in WITHOUT_FILES}
        if licence["source_path"] is None and without and apache:
            texts.append(("Apache-2.0", sorted(without), apache))
            names |= {user: {"Apache-2.0"} for user in without}
            users -= without
        # Without a file of the crate, cargo-about takes the text of SPDX, which has a copyright
        # notice to fill in, except this one.
        if users and licence["source_path"] is None and name != "Apache-2.0":
            faults.append(f"no file with the text of {name} in: {', '.join(sorted(users))}")
        if users:
            texts.append((name, sorted(users), text))
        for user in users:
            names[user].add(name)
    faults += [f"no licence of: {crate}" for crate in sorted(crates) if not names[crate]]
    # cargo-about only warns if a checksum is not that of the file, and leaves the licence out.
    faults += [
        f"{crate} has other files than packaging/about.toml says"
        for crate in sorted(crates)
        if not clarified.get(crate.split()[0], set()) <= names[crate]
    ]
    body = notices.partition("</head>")[2]
    if "Copyright" not in body:
        faults.append("Rust's page about its standard library has another form")
    if faults:
        raise SystemExit("\n".join(f"licences: {fault}" for fault in faults))
    index = [f"{crate}: {', '.join(sorted(names[crate]))}" for crate in sorted(crates)]
    parts = [HEAD + "\n" + "\n".join(index)]
    parts += [f"{name}: {', '.join(users)}\n\n{text}" for name, users, text in sorted(texts)]
    parts += [f"NOTICE: {crate}\n\n{plain(attributions[crate])}" for crate in sorted(attributions)]
    parts.append(plain(html.unescape(re.sub(r"<[^>]+>", "", body))))
    return f"\n\n{RULE}\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Without trailing spaces, and with no more than one empty line at a time."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"licences: {command[0]} failed; {CONFIG.name} lists the licences allowed")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
