"""Two steps of NeMo-RL's GRPO on a CPU in our environments, with expected rewards and advantages."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template
from nemo_ext.job.config import compose
from nemo_ext.rl.job import run as run_job
from nemo_ext.rl.nemo_rl.run import run
from nemo_ext.rl.rewards.advantages import group_advantages
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import arithmetic, bank, tables

pytestmark = pytest.mark.nemo_rl

TEMPLATE = Template.load("nemotron3_nano")
LENGTHS = {"thinking": 0.5, "answer": 0.5, "thinking_bonus": 0.5, "answer_bonus": 0.5, "percentile": 80}


def prompt_of(task: Task) -> str:
    sample = Sample(id=task.id, messages=task.prompt, tools=task.tools)
    return TEMPLATE.render(sample, thinking=task.thinking is not False, add_generation_prompt=True).text


def single_turn(answer: str) -> list[list[str]]:
    """Four responses: right, right after long thinking, right after short thinking at great length, wrong."""
    return [
        [f"{'so ' * 10}</think>{answer}"],
        [f"{'so ' * 40}</think>{answer}"],
        [f"so</think>{'well, ' * 30}{answer}"],
        [f"{'so ' * 20}</think>I do not know."],
    ]


# Verdicts of the environments on them.
VERDICTS = [1.0, 1.0, 1.0, 0.0]


def conversations(task: Task) -> list[list[str]]:
    """Four conversations with the bank: both calls, only the first, no call, one call that changes another thing."""
    calls = [
        TEMPLATE.render(
            Sample(id="-", messages=(Message(role="user"), Message(role="assistant", tool_calls=(call,))))
        ).text
        for call in bank.solution(task)
    ]
    calls = [text[text.index("<tool_call>") :].removesuffix("<|im_end|>\n") for text in calls]
    first, second = (f"I need a tool.</think>{text}" for text in calls)
    done = "done</think>It is done."
    return [[first, second, done], [f"Hm. {first}", done], ["why?</think>No."], [second, "hm</think>Sorry."]]


@pytest.fixture
def tasks() -> list[Task]:
    made = [*arithmetic.tasks(2, seed=1, level=1), *tables.tasks(2, seed=1, level=1)]
    return made


def group_advantage(rewards: list[float], **settings: Any) -> list[float]:
    return group_advantages(rewards, **settings).tolist()


def advantages_of(batch: Any) -> torch.Tensor:
    """Advantage of each response, [responses]."""
    trained = batch["token_mask"].bool()
    found = [row[mask].unique() for row, mask in zip(batch["advantages"], trained, strict=True)]
    assert all(len(values) == 1 for values in found)
    return torch.cat(found)


def controlled(verdicts: list[float], thinking: list[int], answer: list[int]) -> list[float]:
    """Nemotron 3 Nano, equations 4 to 7, written out for groups whose lengths differ."""
    rewards = []
    threshold = np.percentile(verdicts, 80)
    for at, verdict in enumerate(verdicts):
        reward = verdict
        for lengths in (thinking, answer):
            weights = [1 - (n - min(lengths)) / (max(lengths) - min(lengths)) for n in lengths]
            reward += 0.5 * (weights[at] - np.mean(weights))
            reward += 0.5 * (lengths[at] == min(lengths) and verdict > threshold)
        rewards.append(reward)
    return rewards


def lengths_of(responses: list[list[str]]) -> tuple[list[int], list[int]]:
    """Number of bytes, which are the tokens, plus the end token."""
    thinking = [sum(text.index("</think>") + 8 for text in turns) for turns in responses]
    whole = [sum(len(text.encode()) + 1 for text in turns) for turns in responses]
    return thinking, [n - m for n, m in zip(whole, thinking, strict=True)]


COMMON = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "++grpo.val_at_end=false",
    "grpo.normalize_rewards=true",
    "grpo.use_leave_one_out_baseline=true",
    "policy.train_global_batch_size=8",
    "policy.max_total_sequence_length=20000",
    "data.max_input_seq_length=15000",
    "policy.generation.max_new_tokens=4000",
)
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=1",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "++policy.generation.vllm_cfg.enable_vllm_metrics_logger=false",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_two_environments_with_leave_one_out_and_length_control(
    is_async: bool,
    tasks: list[Task],
    grpo_stage: Callable[..., Any],
    grpo_config: Callable[..., dict[str, Any]],
    jsonl: Callable[..., Path],
    tokenizer: Any,
) -> None:
    solutions = [arithmetic.solution(tasks[0]), arithmetic.solution(tasks[1]), *map(tables.solution, tasks[2:])]
    script = {prompt_of(task): single_turn(text) for task, text in zip(tasks, solutions, strict=True)}
    for name, records in (("arithmetic", tasks[:2]), ("tables", tasks[2:])):
        jsonl(f"{name}.jsonl", [task.record() for task in records])
    folder = jsonl("all.jsonl", [task.record() for task in tasks]).parent
    stage = grpo_stage(script, is_async=is_async)

    run(
        {
            "algorithm": "grpo",
            "nemo_rl": grpo_config(*COMMON, *(ASYNC if is_async else ())),
            "template": "nemotron3_nano",
            "tasks": {"train": {"directory": str(folder), "blend": {"arithmetic": 1, "tables": 1}}},
            "advantage": {"baseline": "leave_one_out", "normalise": "unbiased_std"},
            "group": {"length_control": LENGTHS},
        }
    )

    assert len(stage.policy.batches) == 2
    seen = set()
    for batch in stage.policy.batches:
        texts = [
            tokenizer.decode(ids[:length])
            for ids, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)
        ]
        prompts = [max((p for p in script if text.startswith(p)), key=len) for text in texts]
        assert prompts[0] == prompts[3] != prompts[4] == prompts[7]
        kinds = {next(task.environment for task in tasks if prompt_of(task) == prompt) for prompt in prompts}
        assert kinds == {"math", "multiple_choice"}  # one prompt of each in every step
        seen |= set(prompts)
        expected = []
        for begin in (0, 4):
            responses = script[prompts[begin]]
            order = [
                next(n for n, turns in enumerate(responses) if text.startswith(prompts[begin] + turns[0]))
                for text in texts[begin : begin + 4]
            ]
            assert sorted(order) == [0, 1, 2, 3]
            rewards = controlled(VERDICTS, *lengths_of(responses))
            wanted = group_advantage(rewards, baseline="leave_one_out", normalise="unbiased_std")
            expected += [wanted[n] for n in order]
        torch.testing.assert_close(advantages_of(batch), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert seen == set(script)  # two steps of two prompts: all of them
    assert np.isfinite(stage.policy.losses).all() and stage.policy.model.table.abs().sum() > 0
    environments = stage.logger.logged["train/environments", 1]
    for name in ("math", "multiple_choice"):
        # Asynchronous rollouts of later steps may have begun when a step is logged.
        assert environments[f"{name}/correct"] == (pytest.approx(0.75, abs=0.25) if is_async else 0.75)
        assert environments[f"{name}/error"] == 0


def test_conversations_of_several_turns(
    grpo_stage: Callable[..., Any], grpo_config: Callable[..., dict[str, Any]], jsonl: Callable[..., Path]
) -> None:
    made = [task for task in bank.tasks(30, seed=3, level=1) if len(bank.solution(task)) == 2][:2]
    made = [Task.from_record({**task.record(), "thinking": True}) for task in made]
    script = {prompt_of(task): conversations(task) for task in made}
    path = jsonl("bank.jsonl", [task.record() for task in made])
    stage = grpo_stage(script)

    run(
        {
            "algorithm": "grpo",
            "nemo_rl": grpo_config(*COMMON, "grpo.max_rollout_turns=1", "grpo.max_num_steps=1"),
            "template": "nemotron3_nano",
            "tool_style": "nemotron3_nano",
            "tasks": {"train": {"path": str(path)}},
            "advantage": {"baseline": "mean", "normalise": "std"},
        }
    )

    expected = group_advantage([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(advantages_of(stage.policy.batches[0]), torch.tensor(expected * 2), rtol=1e-4, atol=1e-4)
    logged = stage.logger.logged["train/environments", 1]
    assert logged["bank/correct"] == 0.25 and logged["bank/turns"] == (3 + 2 + 1 + 2) / 4


def test_a_single_success_keeps_its_group_in_dynamic_sampling(
    tasks: list[Task],
    grpo_stage: Callable[..., Any],
    grpo_config: Callable[..., dict[str, Any]],
    jsonl: Callable[..., Path],
    nemo_rl: ModuleType,
) -> None:
    wrong = ["so</think>No."]
    solutions = [arithmetic.solution(task) for task in tasks[:2]]
    script = {
        prompt_of(task): [[f"so</think>{text}"], wrong, wrong, wrong]
        for task, text in zip(tasks, solutions, strict=False)
    }
    path = jsonl("tasks.jsonl", [task.record() for task in tasks[:2]])
    stage = grpo_stage(script)

    run(
        {
            "algorithm": "grpo",
            "nemo_rl": grpo_config(*COMMON, "grpo.use_dynamic_sampling=true", "grpo.max_num_steps=1"),
            "template": "nemotron3_nano",
            "tasks": {"train": {"path": str(path)}},
            "advantage": {"baseline": "leave_one_out"},
        }
    )

    expected = group_advantage([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out", normalise="unbiased_std")
    (batch,) = stage.policy.batches
    torch.testing.assert_close(advantages_of(batch), torch.tensor(expected * 2), rtol=1e-4, atol=1e-4)
    # NeMo-RL's own would drop the success, since the deviation of the other rewards is 0.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    _, std = nemo_rl.calculate_baseline_and_std_per_prompt(torch.zeros(4, 1), rewards, torch.ones(4))
    assert std[0] == 0 and std[1] > 0


def test_validation_has_separate_metrics(
    tasks: list[Task],
    grpo_stage: Callable[..., Any],
    grpo_config: Callable[..., dict[str, Any]],
    jsonl: Callable[..., Path],
) -> None:
    solutions = [arithmetic.solution(task) for task in tasks[:2]]
    script = {prompt_of(t): [[f"so</think>{text}"]] for t, text in zip(tasks, solutions, strict=False)}
    script |= {prompt_of(t): [["so</think>No."]] for t in tasks[2:]}
    train, validation = (
        jsonl(f"{name}.jsonl", [t.record() for t in part]) for name, part in (("t", tasks[:2]), ("v", tasks[2:]))
    )
    stage = grpo_stage(script)

    run(
        {
            "algorithm": "grpo",
            "nemo_rl": grpo_config(
                *COMMON, "grpo.val_at_start=true", "grpo.max_val_samples=2", "grpo.val_batch_size=2"
            ),
            "template": "nemotron3_nano",
            "tasks": {"train": {"path": str(train)}, "validation": {"path": str(validation)}},
            "environments": {"math": {"reward": {"name": "domyn_math"}}},
        }
    )

    assert stage.logger.logged["validation/environments", 0]["multiple_choice/correct"] == 0
    trained = stage.logger.logged["train/environments", 1]
    assert trained["math/correct"] == 1 and "multiple_choice/correct" not in trained
    # 3 for the answer; the format's mean is 1, or less where the answer has a box too many; and a short response.
    assert trained["math/reward/correctness"] == 3 and -0.01 < trained["math/reward/length"] < 0


def test_a_preset_trains_with_the_command(
    grpo_stage: Callable[..., Any], jsonl: Callable[..., Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    tasks = list(arithmetic.tasks(4, seed=1, level=1))
    right = {prompt_of(task): arithmetic.solution(task) for task in tasks}
    stage = grpo_stage({prompt: [[f"so</think>{text}"], ["so</think>no"]] for prompt, text in right.items()})
    words = [
        *("engine=nemo_rl", "preset=domyn_math_grpo", f"model={tokenizer_folder}", "template=nemotron3_nano"),
        *(f"tasks.train.path={jsonl('tasks.jsonl', [task.record() for task in tasks])}", f"run_dir={tmp_path / 'run'}"),
        *(
            "rl.prompts_per_step=2",
            "rl.generations_per_prompt=2",
            "rl.batch=4",
            "rl.lengths={prompt: 15000, response: 4000}",
        ),
        *("rl.schedule={kind: constant, steps: 2}", "rl.validation.every=null", "on_inexpressible=warn"),
        *("environments={math: {reward: outcome}}", "nemo_rl.set.checkpointing.enabled=false"),
    ]

    run_job(compose("rl", words))

    assert len(stage.policy.batches) == 2
    for batch in stage.policy.batches:
        wanted = group_advantages([1.0, 0.0], baseline="mean", normalise="unbiased_std").tolist() * 2
        assert sorted(advantages_of(batch).tolist()) == pytest.approx(sorted(wanted), abs=1e-4)
    assert stage.logger.logged["train/environments", 2]["math/correct"] == 0.5
    assert json.loads((tmp_path / "run" / "versions.json").read_text())


STEPS, PROMPTS, BATCHES = 3, 2, 6


@pytest.fixture
def started(
    grpo_stage: Callable[..., Any], grpo_config: Callable[..., dict[str, Any]], jsonl: Callable[..., Path]
) -> Callable[..., Any]:
    """Stage of a run over tasks in order; tasks at some places are never solved, the others sometimes."""

    def start(places: Sequence[int], count: int, *overrides: str) -> tuple[Any, list[str]]:
        # No duplicate prompts, since they identify the scripted responses.
        made = list({prompt_of(task): task for task in arithmetic.tasks(2 * count, seed=1, level=3)}.values())[:count]
        prompts = [prompt_of(task) for task in made]
        wrong = ["so</think>No."]
        stage = grpo_stage(
            {
                prompt: [wrong] * 4 if at in places else [[f"so</think>{arithmetic.solution(task)}"], wrong] * 2
                for at, (task, prompt) in enumerate(zip(made, prompts, strict=True))
            },
            is_async=True,
        )
        path = jsonl("tasks.jsonl", [task.record() for task in made])
        sampling = ("grpo.use_dynamic_sampling=true", f"++grpo.dynamic_sampling_max_gen_batches={BATCHES}")
        run(
            {
                "algorithm": "grpo",
                "nemo_rl": grpo_config(*COMMON, *ASYNC, *sampling, f"grpo.max_num_steps={STEPS}", *overrides),
                "template": "nemotron3_nano",
                "tasks": {"train": {"path": str(path), "shuffle": False}},
            }
        )
        return stage, prompts

    return start


def test_groups_are_replaced_and_no_prompt_is_lost(started: Callable[..., Any], tokenizer: Any) -> None:
    bad = [at for at in range(40) if at % 4 != 3]
    stage, prompts = started(bad, 40)

    assert len(stage.policy.batches) == STEPS
    trained = []
    for batch in stage.policy.batches:
        assert (advantages_of(batch).abs() > 0.5).all()
        texts = [tokenizer.decode(ids[:n]) for ids, n in zip(batch["input_ids"], batch["input_lengths"], strict=True)]
        trained += sorted({at for text in texts for at, prompt in enumerate(prompts) if text.startswith(prompt)})
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    # One more step may have been generated for already; each prompt before was used.
    good = [at for at in range(40) if at not in bad]
    assert set(trained) <= set(good[: (STEPS + 2) * PROMPTS])
    counts = [stage.logger.logged["train/dynamic_sampling", step] for step in range(1, STEPS + 1)]
    for count in counts:
        assert count["kept"] == PROMPTS
        assert count["generated"] == count["kept"] + count["dropped"] == PROMPTS * count["batches"]
        assert count["generated"] <= PROMPTS * BATCHES
        assert count["reward"] == pytest.approx(0.5 * PROMPTS / count["generated"])
    # All dropped prompts up to the last one that was trained on are counted.
    before = sum(at in bad for at in range(min(max(trained), max(good[: STEPS * PROMPTS]))))
    assert sum(count["dropped"] for count in counts) >= before - (PROMPTS + 1) * 3
    assert sum(count["dropped"] for count in counts) > 0


def test_tasks_that_are_never_solved_end_the_run(started: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=r"step 1 .* 12 of 12 generated groups .* rl\.sampling\.max_batches=6 allows no more"
    ):
        started(range(40), 40)


@pytest.mark.slow
def test_unsolvable_tasks_end_the_run_in_a_later_step(
    started: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    # 0.7's loop prints the error and returns.
    with pytest.raises((ValueError, RuntimeError)) as error:
        started(range(2, 40), 40)

    told = str(error.value) + capfd.readouterr().err
    assert "step 2 requires" in told and "12 of 12 generated groups have equal rewards" in told


@pytest.mark.slow
def test_the_end_of_the_data_ends_the_run(
    started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("nemo_ext.rl.nemo_rl.run")
    planned = module.plan_tasks
    monkeypatch.setattr(module, "plan_tasks", lambda *given, spare, **sizes: planned(*given, spare=0, **sizes))

    with pytest.raises((ValueError, RuntimeError)) as error:
        started(range(1, 40), 40)

    assert "no tasks are left; add more to tasks.train" in str(error.value) + capfd.readouterr().err


def test_a_version_that_does_not_replace_groups_is_refused(
    started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("nemo_ext.rl.nemo_rl.compat"), "refills", lambda: False)

    with pytest.raises(ValueError, match="does not replace dropped groups"):
        started([], 4)
