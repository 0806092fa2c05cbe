"""Teachers of on-policy distillation, with random models."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import Distillation
from nemo_ext.rl.job import run
from tests.json_lines import read_jsonl, write_jsonl

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

SIZES = (
    *("rl.prompts_per_step=8", "rl.generations_per_prompt=4", "rl.batch=32", "micro_batch=32"),
    *("rl.lengths={prompt: 64, response: 12}", "on_inexpressible=warn", "save_every=4", "memory_profile=null"),
    *("rl.validation={every: null}", "rl.optimizer.learning_rate=1e-2", "environments={instructions: {}}"),
)


def trained(model: Path, folder: Path, first: int) -> Path:
    """A teacher that writes only the 30 tokens from `first` on."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    teacher = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1)
    for _ in range(40):
        ids = torch.randint(first, first + 30, (16, 32), generator=random)
        teacher(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    teacher.save_pretrained(folder)
    return folder


def task_file(folder: Path, *domains: str, count: int = 8) -> Path:
    rule = {"id": "length_constraints:number_words", "kwargs": {"num_words": 2, "relation": "at least"}}
    reference = {"instructions": [rule], "mode": "all"}
    records = [
        {"id": f"{domain}{n}", "domain": domain, "environment": "instructions", "prompt": f"{domain} {n}"}
        for n in range(count)
        for domain in domains
    ]
    return write_jsonl(folder / "tasks.jsonl", ({**record, "reference": reference} for record in records))


def logs(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_the_policy_approaches_each_teacher_on_its_domain_and_resumes(model: Path, tmp_path: Path) -> None:
    one, two = trained(model, tmp_path / "one", 10), trained(model, tmp_path / "two", 100)
    words = (
        *("preset=opd", f"model={model}", f"tasks.train.path={task_file(tmp_path, 'left', 'right')}", *SIZES),
        f"rl.distillation={{by: domain, teachers: {{left: {one}, right: {two}, default: null}}}}",
    )

    run(compose("rl", [*words, "rl.schedule.steps=24", f"run_dir={tmp_path / 'whole'}"]))
    run(compose("rl", [*words, "rl.schedule.steps=4", f"run_dir={tmp_path / 'parts'}"]))
    run(compose("rl", [*words, "rl.schedule.steps=24", f"run_dir={tmp_path / 'parts'}"]))

    for name in ("teacher_kl/left", "teacher_kl/right"):
        values = [log[name] for log in logs(tmp_path / "whole") if name in log]
        assert values[0] > 6 and np.mean(values[-4:]) < 5.2
        assert [log[name] for log in logs(tmp_path / "parts") if name in log] == values
    assert "teacher_kl/left" in (tmp_path / "whole" / "report.md").read_text()


def test_an_endpoint_measures_as_a_folder_does(model: Path, tmp_path: Path, endpoint: Any, reply: Any) -> None:
    from transformers import AutoModelForCausalLM

    from nemo_ext.rl.trl.teachers import Teachers

    teacher = AutoModelForCausalLM.from_pretrained(trained(model, tmp_path / "t", 10)).eval()

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return teacher(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def answered(payload: dict[str, Any]) -> Any:
        values = [None, *logprobs(torch.tensor([payload["prompt"]]))[0].tolist()]
        choice = {"text": "", "finish_reason": "length", "logprobs": {"token_logprobs": values}}
        return reply(body=json.dumps({"choices": [choice]}).encode())

    endpoint.reply, endpoint.models = answered, ["teacher"]
    settings = Distillation(teachers={"code": endpoint.url, "default": str(tmp_path / "t")})
    teachers = Teachers(settings, tokenizer_of(model), lambda name: False)
    # Prompts are padded on the left, responses on the right.
    ids = torch.tensor([[4, 4, 9, 10, 11, 4], [7, 8, 9, 12, 13, 14]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    expected = torch.zeros(2, 3)
    expected[0, :2] = logprobs(ids[:1, 2:5])[0]
    expected[1] = logprobs(ids[1:])[0, -3:]

    def measure(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        with torch.no_grad():
            outputs = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
        return outputs.log_probs[:, -width:]

    for names in (("code", "default"), ("default", "code")):
        torch.testing.assert_close(teachers.logprobs(names, ids, mask, 3, measure), expected, atol=1e-5, rtol=1e-5)


def test_divergences_are_sums_by_teacher() -> None:
    from nemo_ext.rl.teachers import divergences

    policy, teachers = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]), torch.tensor([[-1.5, -9.0], [-1.0, -3.0]])

    sums = divergences(("a", "b"), teachers, policy, torch.tensor([[1, 0], [1, 1]]))

    assert sums["a"] == (pytest.approx(torch.tensor(-0.5).exp().item() + 0.5 - 1), 1)
    assert sums["b"] == (0, 2)


def test_teachers_for_nemo_rl_are_checked_before_it_starts(model: Path, tmp_path: Path) -> None:
    """NeMo-RL itself would run code of a folder, and would score other tokens."""
    from nemo_ext.rl.algorithms import algorithm_of
    from nemo_ext.rl.commands import training_inputs
    from nemo_ext.rl.nemo_rl.job import _check_teachers

    shutil.copytree(model, tmp_path / "t")
    config = compose("rl", ["preset=opd", f"model={model}", f"rl.distillation.teachers.default={tmp_path / 't'}"])
    algorithm = algorithm_of(config["rl"])
    _check_teachers(config, algorithm)
    larger = tokenizer_of(model)
    larger.add_tokens(["<new>"])
    larger.save_pretrained(tmp_path / "t")
    with pytest.raises(ValueError, match="its vocabulary differs"):
        _check_teachers(config, algorithm)
    (tmp_path / "t" / "modeling_mine.py").write_text("raise SystemExit('ran')\n")
    written = tmp_path / "t" / "config.json"
    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    written.write_text(json.dumps({**json.loads(written.read_text()), **auto_map}))
    with pytest.raises(ValueError, match=r"modeling_mine\.py"):
        _check_teachers(config, algorithm)
    found = {entry.key: entry.path for entry in training_inputs(config, "policy")}
    assert found["rl.distillation.teachers.default"] == tmp_path / "t"


def test_a_teacher_that_cannot_be_used_is_rejected_before_training(model: Path, tmp_path: Path) -> None:
    from nemo_ext.rl.trl.teachers import Teachers

    tokenizer = tokenizer_of(model)
    shutil.copytree(model, tmp_path / "other")
    larger = tokenizer_of(model)
    larger.add_tokens(["<new>"])
    larger.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"teachers\.default=.*other: its vocabulary differs .* in 1 tokens.*<new>"):
        Teachers(Distillation(teachers={"default": str(tmp_path / "other")}), tokenizer, lambda name: False)
    with pytest.raises(ValueError, match=r"teachers\.default=/nowhere must be a Hugging Face folder"):
        Teachers(Distillation(teachers={"default": "/nowhere"}), tokenizer, lambda name: False)
    words = ("preset=opd", f"model={model}", f"tasks.train.path={task_file(tmp_path, 'left')}", *SIZES)
    words += (f"rl.distillation.teachers={{math: {model}, default: null}}", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=r"tasks\.jsonl:1: task left0: .* no teacher for environment 'instructions'"):
        run(compose("rl", [*words, "rl.schedule.steps=2"]))
