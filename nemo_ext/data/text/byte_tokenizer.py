"""Byte tokenizer as a Hugging Face folder: ids 0 to 255 are the bytes, and id 256 ends a document.

`nemo-ext byte_tokenizer` can add a chat template and its control tokens, for models trained from scratch.
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
"""Default chat template: roles and message texts without control tokens, for models that were not trained on chats."""


BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
"""Name of a single-byte token in a SentencePiece vocabulary."""
CONTROL = re.compile(r"<\|[^<>|\s]+\|>")
"""Control token in a chat template, such as `<|im_end|>`."""


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext byte_tokenizer`: write the folder `output`, with the chat template `template` if set.

    `eos_token` is the last control token of the assistant's turn in the template, or `EOD` if there is none.

    Raises:
        ValueError: output is not set, or the template does not exist.
    """
    if not isinstance(config["output"], str) or not config["output"]:
        raise ValueError(f"output must be the folder to write the tokenizer to, not {config['output']!r}")
    folder = Path(config["output"]).expanduser()
    if config["template"] is None:
        write(folder)
        return
    template = Template.load(config["template"])
    chat = Sample(id="chat", messages=(Message(role="user", content="a"), Message(role="assistant", content="b")))
    ends = [CONTROL.findall(text) for text, trained in template.render(chat).segments if trained]
    write(folder, template.source, CONTROL.findall(template.source), end=ends[-1][-1] if ends and ends[-1] else EOD)


def write(folder: Path, template: str = TEMPLATE, control: Sequence[str] = (), *, end: str = EOD) -> Path:
    """Write tokenizer.json and tokenizer_config.json, and return the folder.

    Args:
        control: control tokens of the template; they get ids starting at 257.
        end: end-of-text token, stored as `eos_token`.
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
        path = folder / name
        if not path.is_file() or path.read_text() != text:  # exports compare modification times
            write_text(path, text)
    return folder


def letters() -> list[str]:
    """Return the characters by which byte-level tokenizers represent the bytes 0 to 255 (`bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def token_bytes(name: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a token by its name in a byte-level or SentencePiece vocabulary (`\u2581` is a space)."""
    if byte_level:
        return b"".join(_byte_of().get(letter) or letter.encode() for letter in name)
    if BYTE_NAME.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


@functools.cache
def _byte_of() -> dict[str, bytes]:
    return {letter: bytes([byte]) for byte, letter in enumerate(letters())}
