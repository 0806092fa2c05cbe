import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, processors

from nemo_ext.data.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    check_vocabulary,
    ids_of,
    load_tokenizer,
    megatron_arguments,
)
from tests.small_tokenizers import byte_level_bpe

TEXT = 'def main():\n    print("Grüße, 世界", 1 + 1)\n'


def trained_bpe(*special: str) -> RustTokenizer:
    """A byte-level BPE tokenizer with these special tokens as its first ids."""
    return byte_level_bpe([TEXT * 20, Path(__file__).read_text()], 400, *special)


@pytest.fixture
def bpe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    trained_bpe("<unk>", "<s>", "</s>", "<|im_start|>").save(str(path))
    return path


def megatron_tokenizer(tokenizer: Tokenizer, *, ids_only: bool = False) -> object:
    """Tokenizer that Megatron builds from our arguments, with its own defaults for the rest."""
    build = pytest.importorskip("megatron.core.tokenizers.utils.build_tokenizer")
    config = pytest.importorskip("megatron.training.config.training_config")
    arguments = vars(config.TokenizerConfig()) | {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 1}
    return build.build_tokenizer(
        SimpleNamespace(rank=0, **(arguments | megatron_arguments(tokenizer, ids_only=ids_only)))
    )


# ------------------------------------------------------------------------------------------ bytes


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_bytes_decode_to_the_same_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()

    encoded = tokenizer.encode(texts)

    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode([*ids, tokenizer.eod]) for ids in encoded] == texts


def test_byte_tokenizer_is_megatrons_null_tokenizer_of_the_same_size() -> None:
    tokenizer = ByteTokenizer()

    theirs = megatron_tokenizer(tokenizer)

    assert megatron_arguments(tokenizer) == {"tokenizer_type": "NullTokenizer", "vocab_size": 257}
    assert (theirs.vocab_size, theirs.eod) == (tokenizer.vocab_size, tokenizer.eod) == (257, 256)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------- Hugging Face


def test_ids_are_those_of_the_file_and_decode_to_the_same_text(bpe_file: Path) -> None:
    tokenizer = HuggingFaceTokenizer(bpe_file)

    (ids,) = tokenizer.encode([TEXT])

    assert ids.tolist() == RustTokenizer.from_file(str(bpe_file)).encode(TEXT).ids
    assert ids.dtype == np.uint16
    assert tokenizer.decode([*ids, tokenizer.eod]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod_token, tokenizer.eod) == (400, "</s>", 2)


def test_truncation_padding_and_added_tokens_of_the_file_are_switched_off(tmp_path: Path) -> None:
    rust = trained_bpe("<s>", "</s>")
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    plain = rust.encode(TEXT, add_special_tokens=False).ids
    rust.enable_truncation(max_length=4)
    rust.enable_padding(length=64)
    rust.save(str(tmp_path / "tokenizer.json"))

    (ids,) = HuggingFaceTokenizer(tmp_path).encode([TEXT])

    assert ids.tolist() == plain


def test_text_that_spells_a_special_token_is_text_by_default(bpe_file: Path) -> None:
    text = "a </s> b <|im_start|>"
    as_text, parsed = HuggingFaceTokenizer(bpe_file), HuggingFaceTokenizer(bpe_file, parse_special_tokens=True)

    (ids,) = as_text.encode([text])

    assert as_text.eod not in ids
    assert as_text.decode(ids) == text
    assert parsed.eod in parsed.encode([text])[0]
    assert as_text.identity != parsed.identity


def test_eod_is_the_named_token_then_the_configured_one_then_a_common_one(bpe_file: Path) -> None:
    assert HuggingFaceTokenizer(bpe_file).eod_token == "</s>"
    for written in ("<|im_start|>", {"content": "<|im_start|>", "lstrip": False}):
        (bpe_file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": written}))
        assert HuggingFaceTokenizer(bpe_file).eod_token == "<|im_start|>"
    assert HuggingFaceTokenizer(bpe_file, eod="<s>").eod == 1


def test_a_missing_eod_is_an_error(tmp_path: Path, bpe_file: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json has no token '<im_start>' for eod; did you mean '<\|im_sta"):
        HuggingFaceTokenizer(bpe_file, eod="<im_start>")
    trained_bpe("<end>").save(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"other\.json has none of the tokens .*: set eod to one of its tokens"):
        HuggingFaceTokenizer(tmp_path / "other.json")


def test_an_unusable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")

    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read \(No such file.*: give the path"):
        HuggingFaceTokenizer(tmp_path / "nowhere.json")
    for path in (tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(ValueError, match=r"\.json is not a tokenizer\.json that the tokenizers library can read"):
            HuggingFaceTokenizer(path)


# ---------------------------------------------------------------------------------------- loading


def test_describe_gives_the_tokenizer_back(bpe_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(bpe_file.parent, eod="<s>", parse_special_tokens=True)):
        again = load_tokenizer(json.loads(json.dumps(tokenizer.describe())))

        assert (again.identity, again.eod, again.vocab_size) == (
            tokenizer.identity,
            tokenizer.eod,
            tokenizer.vocab_size,
        )
        assert [ids.tolist() for ids in again.encode([TEXT])] == [ids.tolist() for ids in tokenizer.encode([TEXT])]


def test_identity_depends_on_the_content_not_on_the_path(bpe_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(bpe_file.read_bytes())
    other = tmp_path / "other.json"
    trained_bpe("</s>").save(str(other))

    identity = HuggingFaceTokenizer(bpe_file).identity

    assert HuggingFaceTokenizer(copy).identity == identity
    assert HuggingFaceTokenizer(other).identity != identity
    assert HuggingFaceTokenizer(bpe_file, eod="<s>").identity != identity


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "bite"}, "unknown tokenizer kind 'bite': did you mean 'byte'"),
        ({}, "^data.tokenizer: unknown tokenizer kind None"),
        ({"kind": "byte", "path": "x"}, "unknown key 'path' of a 'byte' tokenizer"),
        ({"kind": "huggingface", "pth": "x"}, "unknown key 'pth' .*did you mean 'path'"),
        ({"kind": "huggingface"}, "must be the path of its tokenizer.json, not None"),
        ({"kind": "huggingface", "path": "x", "eod": 3}, "eod must be the name of a token, not 3"),
        ({"kind": "huggingface", "path": "x", "parse_special_tokens": "no"}, "must be true or false, not 'no'"),
    ],
)
def test_an_invalid_config_is_an_error(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(config)


# --------------------------------------------------------------------------------------- Megatron


def test_padded_rows_do_not_count_as_tokens() -> None:
    """`convert` removes them, so training on their ids would be lost."""
    rows = {"megatron": {"padded_vocab_size": 384}}
    check_vocabulary(384, rows)
    check_vocabulary(300, {**rows, "model": {"vocab_size": 300}})
    check_vocabulary(10**6, {"megatron": {}, "model": {}})
    with pytest.raises(ValueError, match="the tokenizer has 301 ids, but the model has 300 "):
        check_vocabulary(301, {**rows, "model": {"vocab_size": 300}})
    with pytest.raises(ValueError, match="the tokenizer has 385 ids, but the model has 384 "):
        check_vocabulary(385, {**rows, "model": {"vocab_size": 400}})


def test_megatron_agrees_on_size_and_eod_without_transformers(bpe_file: Path) -> None:
    tokenizer = HuggingFaceTokenizer(bpe_file)

    theirs = megatron_tokenizer(tokenizer, ids_only=True)

    assert (theirs.vocab_size, theirs.eod) == (400, 2)  # type: ignore[attr-defined]


def test_megatron_agrees_on_ids_and_eod_when_it_loads_the_file(bpe_file: Path) -> None:
    pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (bpe_file.parent / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HuggingFaceTokenizer(bpe_file)

    theirs = megatron_tokenizer(tokenizer)

    assert (theirs.vocab_size, theirs.eod) == (tokenizer.vocab_size, tokenizer.eod)  # type: ignore[attr-defined]
    assert theirs.tokenize(TEXT) == tokenizer.encode([TEXT])[0].tolist()  # type: ignore[attr-defined]


def test_arguments_under_which_megatron_would_disagree_are_refused(bpe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config\.json has eos_token=None, .* as eod, but .*'</s>'"):
        megatron_arguments(HuggingFaceTokenizer(bpe_file))
    (bpe_file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"eos_token='</s>', .*, but the data ends documents with '<s>'"):
        megatron_arguments(HuggingFaceTokenizer(bpe_file, eod="<s>"))
    assert megatron_arguments(HuggingFaceTokenizer(bpe_file)) == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(bpe_file.parent),
    }

    renamed = bpe_file.rename(tmp_path / "my.json")
    with pytest.raises(ValueError, match=r"Megatron reads only tokenizer\.json: rename"):
        megatron_arguments(HuggingFaceTokenizer(renamed))


def test_a_vocabulary_with_gaps_is_refused_where_megatron_would_count_tokens(tmp_path: Path) -> None:
    rust = RustTokenizer(models.WordLevel({"</s>": 0, "a": 1, "far": 9}, unk_token="a"))
    rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = HuggingFaceTokenizer(tmp_path)

    assert tokenizer.vocab_size == 10
    with pytest.raises(ValueError, match="3 tokens, but ids up to 9"):
        megatron_arguments(tokenizer)
    assert megatron_arguments(tokenizer, ids_only=True)["vocab_size"] == 10


def replace_fastokens(monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=read)))


@pytest.mark.parametrize("parse", [False, True])
def test_fastokens_gives_the_same_ids(parse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastokens")
    tokenizer = trained_bpe("<|endoftext|>")
    tokenizer.encode_special_tokens = not parse
    fast = ids_of(tokenizer)
    monkeypatch.setitem(sys.modules, "fastokens", None)
    plain = ids_of(tokenizer)
    assert fast.__qualname__ != plain.__qualname__
    odd = "a<|endoftext|>b  \r\n\t'LL 1234½ e\u0301 👩‍👩‍👧 \x1c"
    for text in (TEXT, "", odd, "x" * 5000 + " " * 5000, Path(__file__).read_text()):
        assert fast(text).tolist() == plain(text).tolist()


def test_a_tokenizer_that_fastokens_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> object:
        raise ValueError("unsupported")

    tokenizer = trained_bpe()
    replace_fastokens(monkeypatch, refuse)
    assert ids_of(tokenizer)(TEXT).tolist() == tokenizer.encode(TEXT).ids


def test_different_ids_from_fastokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = np.array([0, 1], dtype=np.uint32).tobytes()
    encoder = SimpleNamespace(encode_batch_flat=lambda texts, split_special_tokens: (wrong, b""))
    replace_fastokens(monkeypatch, lambda text: encoder)
    with pytest.raises(RuntimeError, match="uninstall"):
        ids_of(trained_bpe())(TEXT)
