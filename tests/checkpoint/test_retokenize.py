"""`nemo-ext convert tokenizer=NEW`: rows of the vocabulary for another tokenizer."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_ext.checkpoint.convert import run
from nemo_ext.checkpoint.retokenize import vocabulary
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job.config import compose

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def text(seed: int) -> list[str]:
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdeé日", k=chance.randint(1, 5))) for _ in range(60)]
    return [" ".join(chance.choices(words, k=30)) for _ in range(50)]


def byte_level(folder: Path, size: int, seed: int, special: tuple[str, ...]) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return saved(tokenizer, folder, special[0])


def sentencepiece(folder: Path, special: tuple[str, ...], prepend: str = "always") -> Path:
    """Like converted SentencePiece models: characters, a mark for the space, bytes as `<0x41>`."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeé", "ab", "▁ab"]
    vocabulary_ = {piece: number for number, piece in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocabulary_, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return saved(tokenizer, folder, special[0])


def saved(tokenizer: Tokenizer, folder: Path, end: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """A Llama with random weights and a given tokenizer."""

    def make(write: Callable[..., Path], tied: bool = False, rows: int = 0) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = write(tmp_path / "model")
        size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + rows
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=size, tie_word_embeddings=tied, eos_token_id=size - 1, **sizes)
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        return folder

    return make


def convert(source: Path, to: Path, *words: str) -> dict[str, torch.Tensor]:
    run(compose("convert", [f"from={source}", f"to={to}", *words]))
    return load_file(to / "model.safetensors") if (to / "model.safetensors").is_file() else {}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_all_old_tokens_and_more_answers_as_before(
    tied: bool, model: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)), tied, rows=5)
    longer: Any = AutoTokenizer.from_pretrained(source)
    longer.add_tokens(["abcde", "日日"])
    longer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    longer.save_pretrained(tmp_path / "longer")

    made = convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={tmp_path / 'longer'}")

    old = load_file(source / "model.safetensors")
    before: Any = AutoTokenizer.from_pretrained(source)
    ids = before("ab cde éa", return_tensors="pt").input_ids
    models_ = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, tmp_path / "made")]
    logits = [each(ids).logits for each in models_]
    known = len(before)
    assert models_[1].config.vocab_size == known + 3
    assert torch.equal(logits[0][..., :known], logits[1][..., :known])
    assert made.keys() == old.keys()
    for name in TABLES[: 2 - tied]:
        assert torch.equal(made[name][:known], old[name][:known])
        for word in ("abcde", "日日"):
            pieces = before(word, add_special_tokens=False).input_ids
            row = old[name][pieces].float().mean(0).bfloat16()
            assert len(pieces) > 1 and torch.equal(made[name][longer.convert_tokens_to_ids(word)], row)
        # The five rows beyond the tokenizer were never trained: they do not count.
        mean = old[name][:known].float().mean(0).bfloat16()
        torch.testing.assert_close(made[name][longer.convert_tokens_to_ids("<|more|>")], mean, rtol=0.01, atol=1e-4)
    others = old.keys() - set(TABLES)
    assert all(torch.equal(made[name], old[name]) for name in others)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["eos_token_id"] == longer.convert_tokens_to_ids("<|end|>")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert loaded("abcde<|more|>").input_ids == longer("abcde<|more|>").input_ids


@pytest.mark.parametrize("kinds", ["byte to byte", "sentencepiece to byte", "byte to sentencepiece"])
def test_every_row_follows_from_the_two_tokenizers(kinds: str, model: Callable[..., Path], tmp_path: Path) -> None:
    special = ("<|end|>", "<|old|>")
    first = kinds.startswith("byte")

    def old_tokenizer(folder: Path) -> Path:
        return byte_level(folder, 300, 1, special) if first else sentencepiece(folder, special)

    source = model(old_tokenizer)
    new = tmp_path / "new"
    if kinds.endswith("byte"):
        byte_level(new, 320, 2, ("<|end|>", "<|new|>"))
    else:
        sentencepiece(new, ("<|end|>", "<|new|>"))
    # Pieces of a text alone, without the space that SentencePiece puts before it.
    alone = source if first else sentencepiece(tmp_path / "alone", special, prepend="never")
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (alone, new))

    made = convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={new}")

    table, old = made[TABLES[0]].float(), load_file(source / "model.safetensors")[TABLES[0]].float()
    assert len(table) == after.get_vocab_size()
    kept = 0
    for name, number in after.get_vocab().items():
        told = after.decode([number], skip_special_tokens=False)
        if name == "<|end|>":
            assert torch.equal(table[number], old[before.token_to_id(name)])
        elif name == "<|new|>":
            torch.testing.assert_close(table[number], old.mean(0), rtol=0.01, atol=1e-4)
        elif told and "\ufffd" not in told and not name.startswith("<"):
            same = [each for each in before.get_vocab().values() if before.decode([each]) == told]
            pieces = before.encode(told, add_special_tokens=False).ids
            candidates = [old[each] for each in same] or [old[pieces].mean(0).bfloat16().float()]
            assert any(torch.equal(table[number], each) for each in candidates), (name, told)
            kept += bool(same)
    assert kept > 5


def test_megatrons_padding_is_added_and_removed(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    new = byte_level(tmp_path / "new", 310, 2, ("<|end|>", "<|more|>"))

    direct = convert(source, tmp_path / "direct", "to_format=huggingface", f"tokenizer={new}")
    convert(source, tmp_path / "megatron", f"tokenizer={new}")
    back = convert(tmp_path / "megatron", tmp_path / "back")
    convert(source, tmp_path / "plain")
    later = convert(tmp_path / "plain", tmp_path / "later", f"tokenizer={new}")

    model_file = next((tmp_path / "megatron" / "model").glob("*.yaml")).read_text()
    assert "padded_vocab_size: 384" in model_file and "vocab_size: 312" in model_file
    for made in (back, later):
        assert made.keys() == direct.keys()
        assert all(torch.equal(made[name], direct[name]) for name in made)
    for folder in ("back", "later"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["vocab_size"] == 312
        assert (tmp_path / folder / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "later" / "config.json").read_text())["eos_token_id"] == 310


@pytest.mark.parametrize("rows", ["mean", "zero"])
def test_other_rows_for_new_tokens(rows: str, model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    new = byte_level(tmp_path / "new", 310, 2, ("<|end|>",))

    made = convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={new}", f"new_rows={rows}")

    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab() for folder in (source, new))
    lacking = [number for name, number in after.items() if name not in before]
    old = load_file(source / "model.safetensors")[TABLES[1]]
    wanted = old.float().mean(0).bfloat16() if rows == "mean" else torch.zeros(32, dtype=torch.bfloat16)
    assert lacking
    torch.testing.assert_close(made[TABLES[1]][lacking], wanted.expand(len(lacking), -1), rtol=0.01, atol=1e-4)


def test_the_same_tokenizer_again_changes_nothing(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: sentencepiece(folder, ("<|end|>", "<|old|>")))

    made = convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={source}")

    old = load_file(source / "model.safetensors")
    # "a" and "<0x61>" are two tokens of one byte.
    assert all(torch.equal(made[name], old[name]) for name in old)


def test_the_end_of_text_row_and_special_ids_follow_the_new_tokenizer(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>", "<|turn|>", "<|pad|>")))
    config = json.loads((source / "config.json").read_text())
    ids = {"eos_token_id": [300, 301], "pad_token_id": 302, "bos_token_id": 5, "unk_token_id": 302}
    ids |= {"decoder_start_token_id": 6, "image_token_id": 302}
    (source / "config.json").write_text(json.dumps(config | ids | {"initializer_range": 0.5}))
    (source / "generation_config.json").write_text(json.dumps(ids | {"temperature": 0.6}))
    (source / "LICENSE").write_text("mine")
    new = byte_level(tmp_path / "new", 310, 2, ("<|stop|>", "<|turn|>"))
    about = json.loads((new / "tokenizer_config.json").read_text())
    (new / "tokenizer_config.json").write_text(json.dumps(about | {"unk_token": {"content": "<|turn|>"}}))
    (new / "modeling_evil.py").write_text("raise SystemExit")
    (new / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 3}))

    made = convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={new}")
    convert(source, tmp_path / "megatron", f"tokenizer={new}")
    convert(tmp_path / "megatron", tmp_path / "back")

    old = load_file(source / "model.safetensors")
    assert torch.equal(made[TABLES[0]][310], old[TABLES[0]][300])
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (source, new))
    wanted: dict[str, Any] = {"eos_token_id": [310, 311], "pad_token_id": None}
    wanted |= {"unk_token_id": 311, "image_token_id": None}
    wanted["bos_token_id"] = after.token_to_id(str(before.id_to_token(5)))
    wanted["decoder_start_token_id"] = after.token_to_id(str(before.id_to_token(6)))
    for folder in (tmp_path / "made", tmp_path / "back"):
        for name, more in (
            ("config.json", {"initializer_range": 0.5}),
            ("generation_config.json", {"temperature": 0.6}),
        ):
            found = json.loads((folder / name).read_text())
            assert {key: found[key] for key in (*wanted, *more)} == wanted | more
        assert (folder / "LICENSE").read_text() == "mine" and not list(folder.glob("*.py"))


def test_the_same_command_finds_the_target_and_another_choice_does_not(
    model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    new = byte_level(tmp_path / "new", 310, 2, ("<|end|>",))
    words = ("to_format=huggingface", f"tokenizer={new}")
    convert(source, tmp_path / "made", *words)
    assert "are means of pieces" in capsys.readouterr().err

    convert(source, tmp_path / "made", *words)
    with pytest.raises(ValueError, match="made"):
        convert(source, tmp_path / "made", *words, "new_rows=zero")
    old = source / "tokenizer.json"
    old.write_text(old.read_text().replace('"ab"', '"ba"'))
    with pytest.raises(ValueError, match="made"):
        convert(source, tmp_path / "made", *words)


def test_missing_files_are_named(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    new = byte_level(tmp_path / "new", 310, 2, ("<|end|>",))
    large = byte_level(tmp_path / "large", 400, 3, ("<|end|>",))
    for words, message in (
        ([f"tokenizer={tmp_path / 'none'}"], "a folder with a tokenizer.json"),
        (["new_rows=zero"], "have no effect without tokenizer=FOLDER"),
        ([f"tokenizer={new}", f"old_tokenizer={large}"], "name the checkpoint's own"),
        ([f"tokenizer={new}", "new_rows=some"], "new_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "made", "to_format=huggingface", *words)
    (source / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="old_tokenizer=FOLDER"):
        convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={new}")
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    old = byte_level(tmp_path / "old", 300, 1, ("<|end|>",))

    with pytest.raises(CheckpointError, match="ids up to 300, but the checkpoint has only 300 rows"):
        vocabulary(old, old, rows=300)
    assert vocabulary(old, old, rows=301).counts == [1] * 301


def test_tables_that_contradict_the_config_are_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 317}))

    with pytest.raises(CheckpointError, match="of a different shape"):
        convert(source, tmp_path / "made", "to_format=huggingface", f"tokenizer={source}")


def test_stored_padding_and_truncation_are_ignored(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(lambda folder: byte_level(folder, 300, 1, ("<|end|>",)))
    new = byte_level(tmp_path / "new", 310, 2, ("<|end|>",))
    plain = vocabulary(source, new, rows=301)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_padding(length=16, pad_id=14)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(source / "tokenizer.json"))

    assert (plain.old, plain.starts) == ((same := vocabulary(source, new, rows=301)).old, same.starts)
