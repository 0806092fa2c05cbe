"""Quoting of a model's text in a judge's prompt, as a defence against prompt injection.

The quoted text cannot end the quotation, because the closing line contains a nonce that the text's author cannot know.
Nor can it contain tokens of the judge's chat template, because these are made harmless.
"""

import re

from nemo_ext.job.seeds import digest

# Possible special tokens (<|im_end|>, </s>, <SPECIAL_11>, <think>, [INST]) and verdicts ([[A]]).
_TEMPLATE_TOKEN = re.compile(r"<(?=[|｜/]?[A-Za-z_▁|｜][^<>\n]{0,64}>)|\[(?=\[|/?[A-Z_]{1,32}\])")
_WORD_JOINER = "\N{WORD JOINER}"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def plain(text: str) -> str:
    """Return the text with special tokens broken up, and control characters and lone surrogates replaced.

    Special tokens look unchanged, as only a zero-width word joiner (U+2060) is inserted after their first character.
    Control characters and lone surrogates become U+FFFD.
    """
    clean = _CONTROL.sub("\ufffd", text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _TEMPLATE_TOKEN.sub(lambda found: found.group() + _WORD_JOINER, clean)


def nonce(*texts: str) -> str:
    """Return 16 hex digits derived deterministically from all quoted texts, so that no text can contain them."""
    return f"{digest(0, 'quotation', *texts):016x}"


def quote(name: str, text: str, mark: str) -> str:
    """Return the text between BEGIN and END lines that carry its name and the nonce `mark`."""
    return f"BEGIN {name} {mark}\n{plain(text)}\nEND {name} {mark}"
