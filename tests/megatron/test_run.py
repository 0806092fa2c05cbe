"""Configs of ranks, derived from a composed config that does not change."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.megatron.run import Run


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Two phases on text that is not tokenised yet, the second with its own blend, and an FP8 plan."""
    for name, count in (("x", 4), ("y", 8)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{n} {"word " * 40}"}}\n' for n in range(count)))
    of = {name: {"source": {"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")}, "tokens": 1000} for name in "xy"}
    data = {"directory": str(tmp_path / "data"), "tokenizer": {"kind": "byte"}, "workers": 1, "validation_share": 0.3}
    blend = {"by": "temperature", "alpha": 1.0, "of": of}
    made = compose(
        "train",
        [
            *("data=mock", "precision=fp8_blockwise", "model.backend=transformer_engine", "train.tokens=51200"),
            "precision_plan.rules=[M bf16, E bf16, * bf16, - bf16, head bf16]",
            *("megatron.seq_length=64", "megatron.global_batch_size=8", f"run_dir={tmp_path / 'run'}"),
        ],
    )
    for name in ("mock_data", "tokenizer_type", "vocab_size"):
        made["megatron"].pop(name)
    own = {**data, "blend": {"x": {**of["x"], "share": 1}}}
    return {
        **made,
        "data": {**data, "blend": blend},
        "phases": {"a": {"tokens": 25600}, "b": {"tokens": 25600, "data": own}},
    }


def test_a_run_does_not_modify_its_config(config: dict[str, Any]) -> None:
    before = deepcopy(config)

    run = Run.from_config(config)
    tokenized = run.tokenized()

    assert config == before and run.composed is config
    for each in (run, tokenized):
        (segment,) = each.segments
        assert segment["megatron"]["fp8_recipe"] == "blockwise" and segment["segment"]["phases"] == ["a", "b"]
        assert segment["segment"]["train_data_path"]["b"][0] == "1.0"
    assumed, counted = (float(each.config["megatron"]["train_data_path"][0]) for each in (run, tokenized))
    assert assumed == 0.5 and counted < 0.4, "sizes are known only after tokenising"
    assert tokenized.tokenized() is tokenized


def test_without_phases_ranks_start_once() -> None:
    run = Run.from_config(compose("train", ["data=mock"]))

    assert run.plan is None and run.segments == (run.config,) == (run.composed,) and run.stream_remarks() == []


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("run_dir=[a]", r"run_dir=\['a'\]: expected a folder"),
        ("stability=5", "stability=5: expected a section"),
        ("evaluate=x", "evaluate='x': expected a section"),
        ("megatron.train_iters=[x]", "megatron.train_iters must be a whole number"),
        ("megatron.lr=[]", "--lr requires a value; null omits it"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line(word: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Run.from_config(compose("train", [word])).check()
