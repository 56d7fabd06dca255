"""The collection of licences, of crates that are made up here."""

from typing import Any

import pytest

from scripts import licences

CRATES = {"linked 1.0.0", "other 2.0.0"}
PAGE = "<head><title>Notices</title></head><h1>Library</h1>\n\n\n\n<p>Copyright &lt;name&gt;</p>"


def found(licence: str, text: str, *crates: str, file: str | None = "/place/LICENSE") -> Any:
    """As cargo-about reports a text that these crates use."""
    users = [dict(zip(("name", "version"), crate.split(), strict=True)) for crate in crates]
    used_by = [{"crate": user, "path": None} for user in users]
    return {"id": licence, "text": text, "source_path": file, "used_by": used_by}


MIT = found("MIT", "\nCopyright A  \r\n\n\n\nPermission\n", "linked 1.0.0", "macro 3.0.0")
ISC = found("ISC", "Copyright B", "other 2.0.0")
MACRO = found("Zlib", "Copyright C", "macro 3.0.0", "linked 0.9.0")


def test_texts_of_linked_crates_are_written_in_a_stable_order() -> None:
    document = licences.document(CRATES, [MIT, ISC, MACRO], PAGE, {}, {})
    assert document == licences.document(CRATES, [MACRO, ISC, MIT], PAGE, {}, {})
    index, isc, mit, library = document.split(f"\n\n{licences.RULE}\n\n")
    assert index.endswith("\n\nlinked 1.0.0: MIT\nother 2.0.0: ISC")
    assert isc == "ISC: other 2.0.0\n\nCopyright B"
    assert mit == "MIT: linked 1.0.0\n\nCopyright A\n\nPermission"
    assert library == "Library\n\nCopyright <name>\n"
    assert "/place" not in document


def test_a_crate_without_a_licence_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"^licences: no licence of: other 2\.0\.0$"):
        licences.document(CRATES, [MIT, MACRO], PAGE, {}, {})


def test_a_template_without_a_copyright_notice_is_refused() -> None:
    template = found("ISC", "Copyright <year>", "other 2.0.0", "macro 3.0.0", file=None)
    fault = r"^licences: no file with the text of ISC in: other 2\.0\.0$"
    with pytest.raises(SystemExit, match=fault):
        licences.document(CRATES, [MIT, template], PAGE, {}, {})
    # Its text has no copyright notice, and a macro is not part of a binary.
    apache = found("Apache-2.0", "Apache License", "other 2.0.0", file=None)
    macro = found("ISC", "Copyright <year>", "macro 3.0.0", file=None)
    assert "Apache-2.0: other 2.0.0" in licences.document(
        CRATES, [MIT, apache, macro], PAGE, {}, {}
    )


def test_what_only_the_compiler_runs_is_not_linked() -> None:
    names = {crate.split()[0] for crate in licences.linked("x86_64-unknown-linux-gnu")}
    assert {"rustix", "io-uring", "clap", "pyo3"} <= names
    assert names.isdisjoint({"serde_derive", "syn", "cc", "proptest", "dmafile", "dmafile-cli"})


def test_a_clarified_licence_that_is_left_out_is_refused() -> None:
    fault = r"^licences: linked 1\.0\.0 has other files than packaging/about\.toml says$"
    with pytest.raises(SystemExit, match=fault):
        licences.document(CRATES, [MIT, ISC], PAGE, {"linked": {"MIT", "Unicode-DFS-2016"}}, {})
    assert licences.document(CRATES, [MIT, ISC], PAGE, {"linked": {"MIT"}}, {})


def test_another_form_of_the_notices_of_the_standard_library_is_refused() -> None:
    for page in ("<p>Copyright A</p>", "<head></head><p>See elsewhere</p>"):
        with pytest.raises(SystemExit, match=r"^licences: Rust's page .* has another form$"):
            licences.document(CRATES, [MIT, ISC], page, {}, {})


def test_a_notice_of_a_linked_crate_is_passed_on() -> None:
    notices = {"other 2.0.0": "Other\nCopyright B\n"}
    document = licences.document(CRATES, [MIT, ISC], PAGE, {}, notices)
    parts = document.split(f"\n\n{licences.RULE}\n\n")
    assert parts[-2] == "NOTICE: other 2.0.0\n\nOther\nCopyright B"
    found = licences.attributions(licences.linked("x86_64-unknown-linux-gnu"))
    assert any(crate.startswith("object_store ") for crate in found)
