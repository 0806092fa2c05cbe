"""What is refused before a training with evaluations starts, its tokenizer, its metrics."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.text import byte_tokenizer
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from nemo_ext.evaluation import live
from nemo_ext.job.config import compose
from nemo_ext.job.ranks import training_rank

WANTED = ("data=mock", "evaluate.every=5", "evaluate.tokenizer=byte")


def config(*words: str) -> dict[str, Any]:
    return compose("train", list(words))


def test_without_evaluations_nothing_is_checked_and_ranks_are_the_usual_ones() -> None:
    plain = config("data=mock")

    live.check_machine(plain)
    assert training_rank(plain) == "nemo_ext.megatron.rank"
    assert training_rank(config(*WANTED)) == "nemo_ext.evaluation.live.rank"


def test_what_can_be_evaluated_passes() -> None:
    live.check_machine(config(*WANTED))
    live.check_machine(config("data=local_text", "evaluate.every=1e3"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluate.every=0",), "evaluate.every"),
        (("evaluate.suite=quik",), "unknown name 'quik'"),
        (("+evaluate.benchmark=x",), "unknown key 'benchmark'"),
        (("evaluate.tokenizer=null",), "the data config names none"),
        (("evaluate.tokenizer=/nowhere",), "/nowhere"),
        (("megatron.padded_vocab_size=128",), "has 257 ids, but the model has 128"),
        (("megatron.context_parallel_size=2",), "does not support megatron.context_parallel_size=2"),
        (("+megatron.moe_expert_capacity_factor=1.5",), "drop tokens"),
        (("+megatron.cuda_graph_impl=local",), "single sequence length"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    kept = [word for word in WANTED if word.split("=")[0] not in {given.split("=")[0] for given in words}]

    with pytest.raises(ValueError, match=message) as refused:
        live.check(config(*kept, *words))

    assert "\n" not in str(refused.value)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "find_spec", lambda name: None if name == "uvicorn" else sys)

    with pytest.raises(ValueError, match=r"requires uvicorn: pip install 'nemo_ext\[serve"):
        live.check_machine(config(*WANTED))


def test_the_byte_tokenizer_as_a_folder_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(byte_tokenizer.write(tmp_path))
    for text in ("one  two\n\tthree", "größe 大小 🙂", "".join(map(chr, range(256))), ""):
        ids = loaded(text, add_special_tokens=True)["input_ids"]
        assert ids == ByteTokenizer().encode([text])[0].tolist()
        assert loaded.decode(ids, clean_up_tokenization_spaces=False) == text
    own = HuggingFaceTokenizer(tmp_path)
    assert (own.vocab_size, own.eod) == (ByteTokenizer.vocab_size, ByteTokenizer.eod) == (257, loaded.eos_token_id)
    asked = [{"role": "user", "content": "1 + 1?"}]
    assert loaded.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == "user: 1 + 1?\nassistant:"


def test_accuracies_are_a_line_of_metrics_and_scalars(tmp_path: Path, megatron: None) -> None:
    from nemo_ext.megatron.metrics import MetricsWriter

    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

        def flush(self) -> None:
            """Nothing waits."""

    board = Board()

    facts: Any = {
        "first_step": 0,
        "tokens_per_step": 8,
        "flops_per_token": 1.0,
        "flops_per_token_6n": 1.0,
        "peak_flops": None,
    }
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tokens_at=lambda step: 8 * step, tensorboard=board, **facts)

    writer.add_evaluation(5, {"evaluate": {"sums": 0.5}, "evaluate_bits": {"bits": float("nan")}})

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 5,
        "tokens": 40,
        "evaluate": {"sums": 0.5},
        "evaluate_bits": {"bits": None},
    }
    assert board.scalars[0] == ("evaluate/sums", 0.5, 5) and len(board.scalars) == 2
