"""The byte tokenizer as a Hugging Face folder, with the control tokens of a chat template."""

from pathlib import Path

import pytest

from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template, names
from nemo_ext.data.sft.masks import ChatEncoder
from nemo_ext.data.text import byte_tokenizer
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer

CHAT = Sample(id="a", messages=(Message(role="user", content="1 + 1?"), Message(role="assistant", content="Zwölf.")))


@pytest.mark.parametrize("name", names())
def test_control_tokens_and_eos_come_from_the_template(name: str, tmp_path: Path) -> None:
    byte_tokenizer.run({"output": str(tmp_path), "template": name})
    tokenizer = HuggingFaceTokenizer(tmp_path)
    (encoded,) = ChatEncoder(Template.load(tmp_path), tokenizer).encode(CHAT)

    trained = encoded.ids[encoded.mask == 1].tolist()
    assert trained[-1] == tokenizer.eod, "an answer ends with the token that ends a text"
    assert "Zwölf." in tokenizer.decode(trained)
    assert tokenizer.encode(["Zwölf"])[0].tolist() == ByteTokenizer().encode(["Zwölf"])[0].tolist()


def test_without_a_template_the_folder_equals_the_byte_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer.run({"output": str(tmp_path), "template": None})

    assert HuggingFaceTokenizer(tmp_path).eod == ByteTokenizer.eod
    with pytest.raises(ValueError, match="output must be the folder to write the tokenizer to, not None"):
        byte_tokenizer.run({"output": None, "template": None})
