"""Verdicts of `compare` on a trained model and the untrained model, a copy, and the same weights in FP8."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.evaluation.compare import CompareSettings, compared
from nemo_ext.evaluation.live import folder_of
from nemo_ext.job import run_directory

STEPS, TOKENS = 200, 128 * 8
SMALL = (
    "precision=fp32",
    "model=llama_nemotron_tiny",
    "model.pattern='*-*-'",
    "megatron.seq_length=128",
    "megatron.micro_batch_size=8",
    "megatron.global_batch_size=8",
    "megatron.lr=2e-3",
    "megatron.eval_interval=100000",
    "megatron.save_interval=100000",
    "megatron.num_workers=0",
    "evaluate.tokenizer=byte",
    "evaluate.limit=null",
)


@pytest.fixture
def facts(tmp_path: Path) -> tuple[str, ...]:
    """Overrides: 16 invented facts as training text, and three benchmarks on them."""
    draw = random.Random(3)
    rows = []
    for first in range(16):
        question = f"Number of {chr(97 + first)}?"
        gold, others = draw.randrange(4), draw.sample(range(10, 100), 4)
        said = [f" \\boxed{{{number}}}" for number in others]
        rows.append({"question": question, "number": others[gold], "choices": said, "gold": gold})
    for row in rows:
        row["text"] = f"user: {row['question']}\nassistant:{row['choices'][row['gold']]}"
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [draw.choice(rows)["text"] for _ in range(4000)]
    (tmp_path / "taught.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in taught))
    like = {"data": ["facts.jsonl"], "source": "here", "id": "question"}
    prompt = "user: {{ question }}\nassistant:"
    kinds = {
        "said": {"prompt": "{{ question }}", "environment": "math", "reference": {"answer": "number | string"}},
        "chosen": {"kind": "choice", "prompt": prompt, "choices": "choices", "gold": "gold"},
        "bits": {"kind": "bits", "prompt": "{{ text }}", "weight": 0, "higher_is_better": False},
    }
    kinds["said"]["max_tokens"] = 12
    for name, own in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(like | own))
    names = [str(tmp_path / f"{name}.yaml") for name in kinds]
    (tmp_path / "suite.yaml").write_text(json.dumps({"benchmarks": names}))
    stream = f"{{name: taught, weight: 1, source: {{kind: jsonl, path: {tmp_path / 'taught.jsonl'}}}}}"
    data = (f"data_root={tmp_path / 'data'}", f"streams=[{stream}]")
    return *data, f"evaluate.suite={tmp_path / 'suite.yaml'}", f"+evaluate.data_root={tmp_path}"


@pytest.mark.deep
def test_verdicts_on_a_trained_model_and_its_children_are_true(
    tmp_path: Path, facts: tuple[str, ...], launched: Callable[..., str]
) -> None:
    parent = tmp_path / "parent"
    launched("train", *SMALL, *facts, f"run_dir={parent}", f"train.tokens={STEPS * TOKENS}", f"evaluate.every={STEPS}")
    runs = {"untrained": folder_of(parent, 0), "trained": folder_of(parent, STEPS)}
    for name, precision in (("copy", "fp32"), ("fp8", "fp8_current")):
        weights = f"megatron.pretrained_checkpoint={parent / run_directory.CHECKPOINTS}"
        own = (f"precision={precision}", weights, "train.warmup_tokens=0", f"train.tokens={TOKENS}")
        launched("train", *SMALL[1:], *facts, *own, f"run_dir={tmp_path / name}", "evaluate.every=1")
        runs[name] = folder_of(tmp_path / name, 0)

    found = compared(CompareSettings(runs={name: str(folder) for name, folder in runs.items()}, baseline="trained"))

    words = {name: {pair.benchmark: pair.words for pair in pairs} for name, pairs in found.pairs.items()}
    assert words["untrained"] == dict.fromkeys(("said", "chosen", "bits", "grand mean of 2"), "worse")
    assert set(words["copy"].values()) == {"no difference shown"}
    assert {words["fp8"][name] for name in ("said", "chosen")} == {"no difference shown"}
    bits = {pair.a + pair.b: pair.difference for pair in (found.pairs[name][2] for name in ("copy", "fp8"))}
    assert [bits[f"trained{name}"].only_a + bits[f"trained{name}"].only_b for name in ("copy", "fp8")] == [0, 16]
