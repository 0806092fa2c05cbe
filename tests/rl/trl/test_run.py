"""`nemo-ext rl engine=trl` as a user runs it, with a random model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_ext.chat.template import Template
from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import Algorithm
from nemo_ext.rl.job import check_same_run, checked_algorithm, over_own_pairs, planned_tasks, run
from nemo_ext.rl.tasks.job import run as make_tasks
from nemo_ext.rl.trl.run import VISIBLE, _last_checkpoint, _one_gpu, _run_settings
from tests.json_lines import read_jsonl, write_jsonl

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

SMALL = (
    *("rl.prompts_per_step=2", "rl.generations_per_prompt=2", "rl.batch=4", "micro_batch=4", "rl.lengths.response=12"),
    *("rl.schedule={kind: constant, steps: 4}", "on_inexpressible=warn", "save_every=2"),
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "nemo_ext.cli", *words]


def job(*words: str) -> None:
    """Run in this process, because importing TRL takes ten seconds."""
    run(compose("rl", words[1:]))


def stopped_in_a_step(*words: str) -> str:
    """Run the command, end it after its first step with SIGTERM, and return its stderr."""
    process = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "step 1/" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.terminate()
    said += process.communicate()[1]
    assert process.returncode == 130, said
    return said


def refusal(*words: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as told:
        job(*words)
    return str(told.value)


def tasks(folder: Path, *generators: str) -> Path:
    parts = []
    for name in generators:
        make_tasks(compose("rl_tasks", [f"generator={name}", "count=12", "level=1", f"output={folder / name}.jsonl"]))
        parts.append((folder / f"{name}.jsonl").read_text())
    (folder / "tasks.jsonl").write_text("".join(parts))
    return folder / "tasks.jsonl"


def letter_tasks(folder: Path, *prompts: str) -> Path:
    """Tasks that require an "e" in the answer, which a random model sometimes writes."""
    kwargs = {"letter": "e", "let_frequency": 1, "let_relation": "at least"}
    reference = {"instructions": [{"id": "keywords:letter_frequency", "kwargs": kwargs}], "mode": "all"}
    task = {"environment": "instructions", "reference": reference}
    records = ({"id": name, "prompt": name, **task} for name in prompts)
    return write_jsonl(folder / "tasks.jsonl", records)


def trained(run: Path) -> list[dict]:
    """Rollouts that were trained on."""
    return [line for line in read_jsonl(run / "rollouts.jsonl") if not line.get("dropped")]


def rewards(run: Path) -> list[tuple[int, float]]:
    return [(log["step"], log["reward"]) for log in read_jsonl(run / "metrics.jsonl") if "reward" in log]


@pytest.mark.slow
def test_grpo_trains_on_two_environments_and_a_killed_run_resumes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tasks(tmp_path, "arithmetic", "instructions")
    words = ("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}")
    words = (*words, "environments={math: {}, instructions: {}}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    longer = (*SMALL, "rl.schedule.steps=12")
    job(*words, *longer, f"run_dir={whole}")

    process = subprocess.Popen(command(*words, *longer, f"run_dir={killed}"), start_new_session=True)
    while process.poll() is None and not (killed / "checkpoints" / "checkpoint-2" / "trainer_state.json").is_file():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    job(*words, *longer, f"run_dir={killed}")

    assert "resuming from step" in capsys.readouterr().err
    assert [step for step, _ in rewards(whole)] == list(range(1, 13))
    assert [(line["id"], line["response"]) for line in read_jsonl(killed / "rollouts.jsonl")] == [
        (line["id"], line["response"]) for line in read_jsonl(whole / "rollouts.jsonl")
    ]
    assert len(trained(whole)) == 48
    assert {line["domain"] for line in read_jsonl(whole / "rollouts.jsonl")} == {"arithmetic", "instructions"}
    assert (whole / "model" / "model.safetensors").is_file()
    report = (whole / "report.md").read_text()
    assert "![rewards](reward.png)" in report
    assert "Rounding the weights to bfloat16 undoes" in report
    job(*words, *longer, f"run_dir={whole}")
    assert "this run is finished" in capsys.readouterr().err
    # State after a kill while the weights are written.
    (whole / "model").rename(whole / ".model")
    (whole / ".model" / "model.safetensors").unlink()
    job(*words, *longer, f"run_dir={whole}")
    assert (whole / "model" / "model.safetensors").is_file()
    job(*words, *longer, "rl.schedule.steps=14", f"run_dir={whole}")
    assert [step for step, _ in rewards(whole)] == list(range(1, 15))


@pytest.mark.deep
def test_groups_of_equal_rewards_are_replaced_and_a_stopped_run_draws_the_same_tasks(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of three tasks is always solved and one never; for the third, a random model sometimes writes an "a"."""

    def task(number: int) -> dict[str, Any]:
        least = (0, 99, 1)[number % 3]
        kwargs = {"letter": "a", "let_frequency": least, "let_relation": "at least"}
        reference = {"instructions": [{"id": "keywords:letter_frequency", "kwargs": kwargs}], "mode": "all"}
        return {"id": str(number), "environment": "instructions", "prompt": f"{number}", "reference": reference}

    path = write_jsonl(tmp_path / "tasks.jsonl", map(task, range(30)))
    words = (
        *("rl", "preset=rl_zero", f"model={model}", f"tasks.train={{path: {path}, shuffle: false}}", *SMALL),
        *("environments={instructions: {}}", "rl.schedule.steps=8", "rl.generations_per_prompt=8", "rl.batch=16"),
        *("micro_batch=16", "rl.sampling.max_batches=3"),
        "rl.advantage={baseline: leave_one_out, normalise: unbiased_std}",
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    job(*words, f"run_dir={whole}")

    said = stopped_in_a_step(*words, f"run_dir={stopped}")
    assert "stopping and saving after this step" in said
    (step,) = re.findall(r"interrupted: the last checkpoint is at step (\d+); the same command resumes", said)
    assert (stopped / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json").is_file()
    job(*words, f"run_dir={stopped}")
    assert f"resuming from step {step}" in capsys.readouterr().err

    rollouts = read_jsonl(whole / "rollouts.jsonl")
    assert read_jsonl(stopped / "rollouts.jsonl") == rollouts
    logs = [log for log in read_jsonl(whole / "metrics.jsonl") if "reward" in log]
    groups = [rollouts[at : at + 8] for at in range(0, len(rollouts), 8)]
    assert len(groups) == logs[-1]["zero_variance/tasks_drawn"] > 16
    drawn = sorted(int(group[0]["id"]) for group in groups if group[0]["step"] <= 3)
    assert drawn == list(range(len(drawn))), "the first ones in the plan's order, none twice"
    dropped = [group for group in groups if group[0].get("dropped")]
    kept = [group for group in groups if not group[0].get("dropped")]
    assert all(len({line["reward"] for line in group}) == 1 for group in dropped)
    assert len(kept) == 16
    left = sum(len({line["reward"] for line in group}) == 1 for group in kept)
    assert left / 16 == pytest.approx(sum(log["zero_variance/left"] for log in logs) / 8)
    assert 1 <= max(log["zero_variance/refill_rounds"] for log in logs) <= 2


@pytest.mark.slow
def test_two_processes_share_a_run_and_a_stopped_one_resumes_with_the_same_responses(
    model: Path, tmp_path: Path
) -> None:
    path = letter_tasks(tmp_path, *map(str, range(30)))
    words = (
        *("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}", *SMALL, "launcher.nproc_per_node=2"),
        *("environments={instructions: {}}", "rl.schedule.steps=6", "rl.generations_per_prompt=4", "rl.batch=8"),
        *("micro_batch=4", "rl.sampling.max_batches=3"),
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    subprocess.run(command(*words, f"run_dir={whole}"), check=True)

    stopped_in_a_step(*words, f"run_dir={stopped}")
    subprocess.run(command(*words, f"run_dir={stopped}"), check=True)

    rollouts = read_jsonl(whole / "rollouts.jsonl")
    assert read_jsonl(stopped / "rollouts.jsonl") == rollouts
    assert len(trained(whole)) == 6 * 8
    logs = [log for log in read_jsonl(whole / "metrics.jsonl") if "reward" in log]
    assert [log["step"] for log in logs] == list(range(1, 7))
    assert len(rollouts) == 4 * logs[-1]["zero_variance/tasks_drawn"]
    assert sum(log["instructions/episodes"] for log in logs) == len(rollouts), "of both processes"
    varied = [len({line["reward"] for line in trained(whole)[at : at + 4]}) > 1 for at in range(0, 48, 4)]
    assert sum(varied) / 12 == pytest.approx(1 - sum(log["zero_variance/left"] for log in logs) / 6)


@pytest.mark.parametrize(
    "refill", [pytest.param(False, marks=pytest.mark.deep), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_dataset_that_teaches_nothing_loses_its_weight_and_a_stopped_run_draws_the_same(
    refill: bool, model: Path, tmp_path: Path
) -> None:
    """Two datasets: two words, which a random model often writes, and 99, which do not fit in a response."""
    for name, least in (("hope", 2), ("vain", 99)):
        kwargs = {"num_words": least, "relation": "at least"}
        reference = {"instructions": [{"id": "length_constraints:number_words", "kwargs": kwargs}], "mode": "all"}
        task = {"environment": "instructions", "domain": name, "reference": reference}
        records = ({"id": f"{name}{n}", "prompt": f"{name} {n}", **task} for n in range(9))
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    train = f"tasks.train={{directory: {tmp_path}, blend: {{hope: 1, vain: 1}}, adapt: {{keep: 0.2, groups: 2}}}}"
    words = (
        *("rl", "preset=rl_zero", f"model={model}", train, *SMALL, "environments={instructions: {}}"),
        *("rl.prompts_per_step=4", "rl.generations_per_prompt=8", "rl.batch=32", "micro_batch=32"),
        f"rl.sampling={{drop_zero_variance: {refill}, max_batches: {2 if refill else 'null'}}}",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    job(*words, f"run_dir={whole}", "rl.schedule.steps=9")
    for steps in (4, 9):
        job(*words, f"run_dir={parts}", f"rl.schedule.steps={steps}")

    rollouts = read_jsonl(whole / "rollouts.jsonl")
    assert read_jsonl(parts / "rollouts.jsonl") == rollouts
    logs = [log for log in read_jsonl(whole / "metrics.jsonl") if "adaptive/weight/hope" in log]
    assert [log["step"] for log in logs] == list(range(1, 10))
    assert logs[0]["adaptive/weight/vain"] == 0.5
    assert logs[-1]["adaptive/weight/vain"] == pytest.approx(0.2 * 0.5, abs=0.05)
    assert logs[-1]["adaptive/signal/vain"] < 0.1 < 0.4 < logs[-1]["adaptive/signal/hope"]
    late = [line["domain"] for line in rollouts if line["step"] > 5]
    assert 0 < late.count("vain") < 0.3 * len(late), "not below the minimum share"


@pytest.mark.slow
def test_the_model_has_the_template_that_it_was_trained_with(model: Path, tmp_path: Path) -> None:
    path, run_dir = tasks(tmp_path, "arithmetic"), tmp_path / "run"
    words = ("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}", "environments={math: {}}")
    job(*words, *SMALL, "rl.schedule.steps=1", "template=domyn", f"run_dir={run_dir}")

    from transformers import AutoTokenizer

    left = AutoTokenizer.from_pretrained(run_dir / "model")
    assert left.chat_template == Template.load("domyn").source


@pytest.mark.slow
def test_rewarded_behaviour_is_learned(model: Path, tmp_path: Path) -> None:
    """A random model rarely writes an "e" in a response of twelve bytes; after training nearly always."""
    path = letter_tasks(tmp_path, "a", "b")

    job(
        *("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}", "environments={instructions: {}}"),
        *(*SMALL, "rl.generations_per_prompt=16", "rl.batch=32", "micro_batch=32", "rl.schedule.steps=40"),
        *("save_every=40", "trl.learning_rate=0.01", f"run_dir={tmp_path / 'run'}"),
    )

    earned = [reward for _, reward in rewards(tmp_path / "run")]
    assert sum(earned[:5]) / 5 < 0.4
    assert sum(earned[-5:]) / 5 > 0.8


@pytest.mark.deep
def test_a_conversation_with_a_bank_is_trained_on(model: Path, tmp_path: Path) -> None:
    path = tasks(tmp_path, "bank")

    job(
        *("rl", "preset=domyn_multi_env_grpo", f"model={model}", f"tasks.train.path={path}", "environments={bank: {}}"),
        *(*SMALL, "rl.lengths.prompt=null", "rl.lengths.total=4096"),
        *("rl.schedule.warmup_steps=0", "rl.schedule.steps=2"),
        f"run_dir={tmp_path / 'run'}",
    )

    assert [step for step, _ in rewards(tmp_path / "run")] == [1, 2]
    assert {line["domain"] for line in read_jsonl(tmp_path / "run" / "rollouts.jsonl")} == {"bank"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["rl_zero", "rloo_if"])
def test_a_response_ends_where_the_templates_turn_does(
    speaker: Path, letter_tasks: Path, tmp_path: Path, preset: str
) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(speaker, tmp_path / "speaker")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|begin_of_text|>"  # base models often have a different end token from their templates
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))

    job(
        *("rl", f"preset={preset}", f"model={folder}", f"tasks.train.path={letter_tasks}", *SMALL),
        *("environments={instructions: {}}", "rl.schedule.steps=1", "rl.lengths.response=48"),
        f"run_dir={tmp_path / 'run'}",
    )

    made = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert sum(line["finished"] for line in made) >= 0.75 * len(made) > 0
    assert not any("<|" in line["response"] for line in made if line["finished"])
    saved = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 1, 3]


@pytest.mark.slow
def test_guards_are_applied_and_monitored(model: Path, tmp_path: Path) -> None:
    path = letter_tasks(tmp_path, "a", "b")
    words = (
        *("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}", "environments={instructions: {}}"),
        *("rl.advantage.clip=1", "rl.penalties={thinking: -1, tool_call: -1}", "rl.loss.on_policy=true", *SMALL),
        *("rl.sampling={drop_zero_variance: false, max_batches: null}", "rl.generations_per_prompt=8", "rl.batch=16"),
    )

    job(*words, "rl.loss.mismatch=1.5", f"run_dir={tmp_path / 'kept'}")
    job(*words, "rl.loss.mismatch=1.0", "trl.temperature=0.9", f"run_dir={tmp_path / 'excluded'}")

    kept = [log for log in read_jsonl(tmp_path / "kept" / "metrics.jsonl") if "loss" in log]
    # Generation and training have the same weights, so that log-probabilities agree up to rounding.
    assert all(1 <= log["guards/mismatch"] < 1.0001 and log["guards/masked_responses"] == 0 for log in kept)
    assert any(log["grad_norm"] > 0 for log in kept)
    assert all(log["guards/malformed_thinking"] == log["guards/malformed_tool_calls"] == 0 for log in kept)
    report = (tmp_path / "kept" / "report.md").read_text()
    assert "## Monitor" in report and "| good |" in report and (tmp_path / "kept" / "monitor.png").is_file()
    # Rounding alone exceeds a limit of exactly 1.
    excluded = [log for log in read_jsonl(tmp_path / "excluded" / "metrics.jsonl") if "loss" in log]
    assert all(log["guards/masked_responses"] > 0.5 for log in excluded)
    assert "too high at the end" in (tmp_path / "excluded" / "report.md").read_text()


@pytest.mark.slow
def test_rloo_trains_and_validates(model: Path, tmp_path: Path) -> None:
    path = tasks(tmp_path, "instructions")

    job(
        *("rl", "preset=rloo_if", f"model={model}", f"tasks.train.path={path}", *SMALL, "rl.schedule.steps=2"),
        *(f"tasks.validation.path={path}", "rl.validation={every: 2, at_start: true}", f"run_dir={tmp_path / 'run'}"),
    )

    logs = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [log["step"] for log in logs if "eval_reward" in log] == [0, 2]


@pytest.mark.slow
def test_savings_do_not_change_results(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefill of a group, trimmed padding, skipped responses without advantage, and the KL in validations."""
    from nemo_ext.rl.trl import trainers

    path = letter_tasks(tmp_path, "a", "bbbbbb", "cc")
    words = (
        *("rl", "preset=rl_zero", f"model={model}", f"tasks.train.path={path}", *SMALL, "rl.sampling.max_batches=1"),
        *("environments={instructions: {}}", "rl.generations_per_prompt=8", "rl.batch=16", "micro_batch=4"),
        *(f"tasks.validation.path={path}", "rl.validation={every: 4, at_start: true, kl: true}"),
        "trl.learning_rate=0.01",
    )
    job(*words, f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(trainers, "_trimmed", lambda batch, **others: batch)
    monkeypatch.setattr(trainers, "_prefilled", lambda *given: {})
    job(*words, f"run_dir={tmp_path / 'plain'}")

    assert read_jsonl(tmp_path / "run" / "rollouts.jsonl") == read_jsonl(tmp_path / "plain" / "rollouts.jsonl")
    logs, plain = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("run", "plain"))
    norms = [log["grad_norm"] for log in logs if "grad_norm" in log]
    assert norms == pytest.approx([log["grad_norm"] for log in plain if "grad_norm" in log], rel=1e-3)
    assert max(norms) > 0
    validated, as_plain = ([log for log in each if "eval_reward" in log] for each in (logs, plain))
    assert [log["eval_kl"] for log in validated] == pytest.approx([log["eval_kl"] for log in as_plain], rel=1e-3)
    assert validated[0]["eval_kl"] == 0
    assert validated[-1]["eval_kl"] > 1e-4
    # A batch has the answers to two of the three tasks.
    assert all(log["eval_reward"] == pytest.approx(log["eval_instructions/reward"]) for log in validated)
    assert "eval_kl" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.slow
def test_a_judge_compares_the_answers_of_a_group(model: Path, tmp_path: Path, endpoint: Any, reply: Any) -> None:
    """The judge prefers the first response; with both orders this cancels, and only length matters."""
    chats = ({"id": n, "environment": "chat", "prompt": f"Say {n}."} for n in "ab")
    path = write_jsonl(tmp_path / "chat.jsonl", chats)
    words = ("rl", "preset=nemotron3_rlhf", f"model={model}", f"tasks.train.path={path}", *SMALL, "rl.schedule.steps=2")
    words = (*words, "rl.lengths={response: 12, total: 512}", "rl.validation.every=null", "rl.group.judge.model=judge")
    endpoint.reply = lambda payload: (
        reply(body=json.dumps({"data": [{"id": "judge"}]}).encode())
        if payload.get("path") == "/v1/models"
        else reply(text='{"score_1": 4, "score_2": 2, "ranking": 2}')
    )

    assert "unknown model 'jugde'" in refusal(
        *words, f"rl.group.judge.endpoint={endpoint.url}", "rl.group.judge.model=jugde", f"run_dir={tmp_path / 'no'}"
    )
    endpoint.requests.clear()
    job(*words, f"rl.group.judge.endpoint={endpoint.url}", "rl.group.show=instructed", f"run_dir={tmp_path / 'run'}")

    asked = [request for request in endpoint.requests if "messages" in request]
    assert len(asked) == 2 * 2 * 2, "two steps, two groups, each with the next and the last with the first"
    assert "Compare two responses" in asked[0]["messages"][0]["content"]
    rollouts = trained(tmp_path / "run")
    assert {line["domain"] for line in rollouts} == {"chat"}
    for place in range(0, len(rollouts), 2):
        one, other = rollouts[place : place + 2]
        assert one["reward"] + other["reward"] == pytest.approx(6), "3 each, and lengths add up to nothing"


@pytest.mark.slow
def test_a_reward_model_is_trained(model: Path, tmp_path: Path) -> None:
    messages = [{"role": role, "content": "hm"} for role in ("user", "response_1", "response_2")]
    compared = ({"id": n, "messages": messages, "ranking": 2} for n in "ab")
    records = write_jsonl(tmp_path / "genrm.jsonl", compared)
    path = tmp_path / "tasks.jsonl"
    make_tasks(compose("rl_tasks", [f"records={records}", "environment=genrm", f"output={path}"]))

    job(
        *("rl", "preset=genrm_training", f"model={model}", f"tasks.train.path={path}", *SMALL, "rl.schedule.steps=2"),
        *("rl.lengths={response: 12, prompt: 4096}", "rl.validation.every=null", f"run_dir={tmp_path / 'run'}"),
    )

    assert rewards(tmp_path / "run") == [(1, -10), (2, -10)], "a random model gives no readable scores"
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["genrm/reward/format"] == -10


@pytest.mark.slow
def test_dpo_trains_on_pairs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a config of multi-token prediction, which is not trained: the trained model says that it has none."""
    model, pairs = shutil.copytree(model, tmp_path / "model"), tmp_path / "pairs.jsonl"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pairs.open("w") as file:
        for number in range(8):
            prompt = [{"role": "user", "content": f"say {number}"}]
            answers = ([{"role": "assistant", "content": text}] for text in (str(number), "no"))
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True))) + "\n")
    words = (
        *("rl", "preset=dpo_delta", f"model={model}", f"pairs.train={pairs}", "rl.batch=4"),
        *("rl.schedule={kind: constant, steps: 4, epochs: null, examples: null}", "rl.optimizer.learning_rate=1e-3"),
        *("rl.schedule.warmup_share=null", "rl.schedule.final_share=0.0", "on_inexpressible=warn"),
    )

    job(*words, "micro_batch=4", f"run_dir={tmp_path / 'run'}")

    logs = [log for log in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "rewards/margins" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert "TRL trains without multi-token prediction" in capsys.readouterr().err
    for folder in (tmp_path / "run/model", tmp_path / "run/checkpoints/checkpoint-4"):
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0

    two = tmp_path / "two"
    subprocess.run(command(*words, "micro_batch=2", "launcher.nproc_per_node=2", f"run_dir={two}"), check=True)
    for name, tensor in load_file(two / "model" / "model.safetensors").items():
        assert torch.allclose(tensor, load_file(tmp_path / "run/model/model.safetensors")[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "preset=null"),
        (["preset=rl_zero"], "model=null"),
        (["preset=rl_zero", "model=m"], "tasks.train=null"),
        (["preset=dpo_delta", "model=m"], "pairs.train=null"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "rl.lose.level=token"], "did you mean 'loss'"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "engine=tlr"], "engine='tlr': input should be 'trl'"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "environments={maths: {}}"], "did you mean 'math'"),
        (["preset=rl_zero", "model=m", "pairs.train=p", "tasks.train.path=t"], "trains on tasks, not on pairs"),
        (["preset=rl_zero", "model=m", "tasks.train=t"], "tasks.train=t is not a section; set tasks.train.path=t"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "tasks.validation=t"], "set tasks.validation.path=t"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "tasks.validation.paht=t"], "input should be 'path'"),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "micro_batch=abc"], "micro_batch"),
        (
            ["preset=rl_zero", "model=m", "tasks.train={path: t, reprofile: {every: 2}}", "engine=nemo_rl"],
            "reprofile requires engine=trl",
        ),
        (
            [
                *("preset=rl_zero", "model=m", "tasks.train={directory: t, adapt: {}}", "engine=nemo_rl"),
                "rl.asynchronous={max_age: 1, in_flight: false}",
            ],
            "set rl.asynchronous=null",
        ),
        (["preset=rl_zero", "model=m", "tasks.train.path=t", "save_every=0"], "save_every"),
        (
            ["preset=rl_zero", "model=m", "tasks.train.path=t", "launcher.nproc_per_node=64"],
            "rl.prompts_per_step=32 must be a multiple of launcher.nproc_per_node=64",
        ),
        (
            ["preset=rpo_offline", "model=m", "pairs.train=p", "launcher.nproc_per_node=2"],
            "launcher.nproc_per_node=2 does not support algorithm=rpo",
        ),
        (
            ["preset=rl_zero", "model=m", "tasks.train.path=t", "engine=nemo_rl", "launcher.nproc_per_node=2"],
            "applies only to engine=trl",
        ),
        (
            ["preset=dpo_delta", "model=m", "pairs.train={path: t}"],
            "pairs.train={'path': 't'}: input should be a valid string",
        ),
    ],
)
def test_missing_and_misspelled_settings_are_reported(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        checked_algorithm(compose("rl", words))


def test_a_run_resumes_with_the_same_settings_or_more_steps() -> None:
    words = ["preset=rl_zero", "model=m", "tasks.train.path=t", "rl.schedule.steps=4"]
    before = compose("rl", words)

    check_same_run(before, compose("rl", [*words[:-1], "rl.schedule.steps=8", "save_every=1"]))
    check_same_run(before, compose("rl", [*words, "nemo_rl.set.cluster.num_nodes=4"]))
    check_same_run(before, compose("rl", [*words, "rl.environments.code.concurrency=1024"]))
    with pytest.raises(ValueError, match=r"rl\.loss\.clip_high: 0\.272 -> 0\.3"):
        check_same_run(before, compose("rl", [*words, "rl.loss.clip_high=0.3"]))
    with pytest.raises(ValueError, match=r"trl\.learning_rate: null -> 0\.1"):
        check_same_run(before, compose("rl", [*words, "trl.learning_rate=0.1"]))
    capped = [*words[:2], "tasks.train={directory: d, blend: {a: {share: 1, cap_epochs: 3}}}"]
    with pytest.raises(ValueError, match=r"rl\.schedule\.steps: 4 -> 8"):
        check_same_run(compose("rl", [*capped, "rl.schedule.steps=4"]), compose("rl", [*capped, "rl.schedule.steps=8"]))


def test_epochs_count_the_actual_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": 1}\n' * 10)
    words = ["preset=dpo_delta", "model=m", f"pairs.train={pairs}"]

    def made(*more: str) -> Algorithm:
        config = compose("rl", [*words, *more])
        return over_own_pairs(config, checked_algorithm(config))

    assert made("rl.batch=2").steps == 2 * 5
    assert "2 epochs over 10 pairs: 10 steps" in capsys.readouterr().err
    assert made("rl.schedule.steps=7").steps == 7
    with pytest.raises(ValueError, match=r"has 10 pairs, fewer than rl\.batch=2048; lower rl\.batch to at most 10"):
        made()


def test_tasks_are_drawn_by_the_runs_seed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["preset=rl_zero", "model=m", "seed=7"]

    def train(*more: str) -> dict[str, Any]:
        config = compose("rl", [*words, *more])
        return planned_tasks(config, checked_algorithm(config))["train"]

    assert train("tasks.train.path=t")["seed"] == 7
    assert train("tasks.train={path: t, seed: 3}")["seed"] == 3
    assert "seed" not in train("tasks.train.curriculum=c")
    weights = "environments={math: {weight: 3}, code: {weight: 1}}"
    assert train("tasks.train.directory=d", weights)["streams"] == [
        {"name": "math", "weight": 3},
        {"name": "code", "weight": 1},
    ]
    assert not capsys.readouterr().err
    train("tasks.train.path=t", weights)
    assert "weights of rl.environments are ignored" in capsys.readouterr().err


def test_steps_of_several_updates_are_saved_whole() -> None:
    paths = ("tasks.train.path=t", "tasks.validation.path=v")
    words = ["preset=llama_nemotron_grpo", "model=m", *paths, "environments={math: {}}", "rl.curriculum=null"]
    config = compose("rl", words)
    algorithm = checked_algorithm(config)
    fresh, resumed = (_run_settings(config, algorithm, resumed=resumed) for resumed in (False, True))

    assert algorithm.updates_per_step == 2
    assert (fresh["save_steps"], fresh["eval_steps"]) == (50 * 2, 10 * 2)
    assert not resumed["eval_on_start"]


@pytest.mark.slow
def test_errors_found_by_a_run_are_one_line(model: Path, tmp_path: Path) -> None:
    path = tasks(tmp_path, "arithmetic")
    words = ("rl", "preset=rl_zero", f"model={model}", f"run_dir={tmp_path / 'run'}", *SMALL)

    done = subprocess.run(
        command(*words[:2], "model=nowhere", *words[3:], f"tasks.train.path={path}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: model=nowhere has no config.json")
    assert "no such task file" in refusal(*words, "tasks.train.path=nowhere.jsonl")
    assert "did you mean 'learning_rate'" in refusal(*words, f"tasks.train.path={path}", "trl.learning_rat=1")
    assert "unknown key 'foo'" in refusal(
        *words, f"tasks.train.path={path}", "environments={math: {settings: {foo: 1}}}"
    )
    low = (*words, f"tasks.train.path={path}", "precision=fp8_current", "on_inexpressible=error")
    assert "precision_plan: TRL trains and generates in the data type of the model" in refusal(*low)
    for content, said in (("{", "not JSON"), ("", "no pairs"), ('{"a": 1}\n', "expected a pair with prompt, chosen")):
        (tmp_path / "pairs.jsonl").write_text(content)
        dpo = ("rl", "preset=dpo_delta", f"model={model}", f"pairs.train={tmp_path}/pairs.jsonl", "rl.batch=1")
        own = ("rl.schedule={kind: constant, steps: 1, warmup_share: null}", "on_inexpressible=warn")
        assert said in refusal(*dpo, *own, f"run_dir={tmp_path / 'dpo'}")
    assert "rl.environments does not contain" in refusal(
        *words, f"tasks.train.path={path}", "environments={multiple_choice: {}}"
    )


def test_a_truncated_checkpoint_is_ignored(tmp_path: Path) -> None:
    for step, state in ((2, "{}"), (4, ""), (6, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)

    assert _last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_single_process_sees_a_single_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for before, within in ((None, "0"), ("", ""), ("2", "2"), ("2,3", "2")):
        monkeypatch.delenv(VISIBLE, raising=False)
        if before is not None:
            monkeypatch.setenv(VISIBLE, before)
        with _one_gpu():
            assert os.environ[VISIBLE] == within
        assert os.environ.get(VISIBLE) == before
    assert capsys.readouterr().err.count("using the first of 2 visible GPUs") == 1
