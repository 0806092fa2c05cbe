"""The byte tokenizer as a Hugging Face folder, for what wants one: ids 0 to 255 are the bytes, 256 ends a document.

`nemo-ext byte_tokenizer` adds a chat template and its control tokens: the tokenizer of a model made from nothing.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template
from nemo_ext.data.text.tokenizers import ByteTokenizer
from nemo_ext.job.files import write_text

EOD = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template of a tokenizer without one: roles and texts, as a model that never saw a chat may read them."""


BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
"""Name of the token of a single byte, in a vocabulary of pieces."""
_CONTROL = re.compile(r"<\|[^<>|\s]+\|>")


def run(config: Mapping[str, Any]) -> None:
    """Job `nemo-ext byte_tokenizer`: the folder `output`, for the chat template `template`.

    A text ends with what ends the assistant's turn in the template, if that is one control token, else with `EOD`.

    Raises:
        ValueError: no output is named, or there is no such template.
    """
    if not isinstance(config["output"], str) or not config["output"]:
        raise ValueError(f"output={config['output']}: name a folder")
    folder = Path(config["output"]).expanduser()
    if config["template"] is None:
        write(folder)
        return
    template = Template.load(config["template"])
    chat = Sample(id="chat", messages=(Message(role="user", content="a"), Message(role="assistant", content="b")))
    ends = [_CONTROL.findall(text) for text, trained in template.render(chat).segments if trained]
    write(folder, template.source, _CONTROL.findall(template.source), end=ends[-1][-1] if ends and ends[-1] else EOD)


def write(folder: Path, template: str = TEMPLATE, control: Sequence[str] = (), *, end: str = EOD) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the folder.

    Args:
        folder: where to.
        template: source of the chat template.
        control: its control tokens, which get the ids from 257 on.
        end: token that ends a text, `eos_token`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict.fromkeys([EOD, *control])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    assert tokenizer.token_to_id(EOD) == ByteTokenizer.eod
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": template}
    texts = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(about, indent=1) + "\n"}
    for name, text in texts.items():
        if (
            not (path := folder / name).is_file() or path.read_text() != text
        ):  # an export knows its files by their times
            write_text(path, text)
    return folder


def letters() -> list[str]:
    """The letter by which a byte-level tokenizer writes each byte (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def token_bytes(name: str, *, byte_level: bool) -> bytes:
    """Bytes of a token by its name in a byte-level vocabulary, or in one of pieces with `\u2581` for a space."""
    if byte_level:
        return b"".join(_byte_of().get(letter) or letter.encode() for letter in name)
    if BYTE_NAME.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


@functools.cache
def _byte_of() -> dict[str, bytes]:
    return {letter: bytes([byte]) for byte, letter in enumerate(letters())}
