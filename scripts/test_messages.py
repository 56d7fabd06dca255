"""The language of messages: words for which CONTRIBUTING.md has a better one."""

import re

from scripts.messages import ROOT, messages

AVOIDED = re.compile(
    r"""\b(?:
    whoever|anew|meanwhile|sentence|of\ ours|somebody|be\ had|is\ told|comes\ twice|not\ sound
    |cut\ (?:it\ )?short|ask(?:ed)?\ about|(?:has|have)\ to\ be|once\ more|a\ mistake\ in
    |lies?\ (?:in|on|at|behind|before|outside|past)|come(?:s)?\ into\ being|for\ good
    |(?:it|that|this)\ is\ no|is\ none\ of|is\ no\ (?:number|option|pattern|regular|whole)
    )\b""",
    re.VERBOSE,
)


def test_messages_do_not_use_avoided_words() -> None:
    found = list(messages())
    texts = {message.text for message in found}
    # From each language, and from each kind of string.
    assert {"no such tensor", "cannot use dmafile.ko", "the file is closed"} <= texts
    assert any("DMAFILE_FD is its descriptor, DMAFILE_BYTES" in text for text in texts)
    assert len(texts) > 900
    odd = [str(message) for message in found if AVOIDED.search(message.text)]
    assert not odd, "\n".join(odd)


def test_only_the_command_writes_its_options_into_messages() -> None:
    """Callers from Rust, C and Python know them by other names: `message!` takes an `Opt`."""
    libraries = [one for one in messages() if not one.file.is_relative_to(ROOT / "crates" / "cli")]
    # A command to type has its own options.
    texts = {str(one): re.sub(r"dmafile \w+(?: --[a-z]+)+", "", one.text) for one in libraries}
    odd = [message for message, text in texts.items() if re.search(r"--[a-z]", text)]
    assert not odd, "\n".join(odd)
