"""The byte tokenizer as a Hugging Face folder, for what wants one: ids 0 to 255 are the bytes, 256 ends a document."""

import json
from pathlib import Path

from nemo_ext.data.text.tokenizers import ByteTokenizer
from nemo_ext.job.files import write_text

EOD = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template of a tokenizer without one: roles and texts, as a model that never saw a chat may read them."""


def write(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(_letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOD, normalized=False)])
    assert tokenizer.token_to_id(EOD) == ByteTokenizer.eod
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "chat_template": template}
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    write_text(folder / "tokenizer_config.json", json.dumps(about, indent=1) + "\n")
    return folder


def _letters() -> list[str]:
    """The letter by which a byte-level tokenizer writes each byte (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
