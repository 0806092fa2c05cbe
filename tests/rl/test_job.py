"""The number of steps, and other settings that are checked first."""

import json
from pathlib import Path

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import PolicyGradient
from nemo_ext.rl.job import check_steps, checked_algorithm, run


def refusal(*words: str) -> str:
    config = compose("rl", ["model=m", *words])
    with pytest.raises(ValueError, match="null: ") as problem:
        check_steps(config, checked_algorithm(config))
    return str(problem.value)


def test_error_for_a_preset_without_steps_suggests_one_epoch(tmp_path: Path) -> None:
    for name, count in (("math", 100), ("code", 28), ("curriculum", 64)):
        (tmp_path / f"{name}.jsonl").write_text("{}\n" * count)
    path = f"tasks.train.path={tmp_path}/math.jsonl"
    zero = ("preset=rl_zero", "environments={math: {}, code: {}}")  # 32 prompts per step

    assert refusal(*zero, path) == (
        "rl.schedule.steps=null: set it, as the preset's source (OLMo 3, RL-Zero) states no number of steps; one epoch "
        "over 100 tasks with 32 per step is rl.schedule.steps=3"
    )
    assert "the paper's 1 epoch over 100 tasks" in refusal("preset=domyn_multi_env_grpo", path)
    assert refusal(*zero, path, "rl.schedule.epochs=2").endswith(
        "2 epochs over 100 tasks with 32 per step is rl.schedule.steps=6"
    )
    assert refusal(*zero, path, "rl.prompts_per_step=128", "rl.batch=1024").endswith("=1")
    assert refusal(*zero, f"tasks.train.directory={tmp_path}").endswith(
        "128 tasks with 32 per step is rl.schedule.steps=4"
    )
    shares = f"tasks.train={{directory: {tmp_path}, blend: {{math: {{share: 1}}}}}}"
    assert "100 tasks" in refusal(*zero, shares)
    assert refusal(*zero, f"tasks.train.curriculum={tmp_path}").endswith("steps=2")
    assert refusal(*zero, "tasks.train.path=nowhere.jsonl").endswith("states no number of steps")


def test_presets_with_steps_or_epochs_are_accepted() -> None:
    for words in (
        ("preset=domyn_math_grpo", "tasks.train.path=t"),
        ("preset=rl_zero", "tasks.train.path=t", "rl.schedule.steps=3"),
        ("preset=dpo_delta", "pairs.train=p"),
    ):
        config = compose("rl", ["model=m", *words])
        check_steps(config, checked_algorithm(config))


def test_steps_are_checked_before_anything_slow(tmp_path: Path) -> None:
    words = ["preset=rl_zero", f"model={tmp_path}", "tasks.train.path=nowhere.jsonl", f"run_dir={tmp_path}/run"]

    with pytest.raises(ValueError, match=r"rl\.schedule\.steps=null"):
        run(compose("rl", words))
    assert not (tmp_path / "run").exists()


def test_nemotron3_rlvr_on_generated_tasks_needs_no_judge() -> None:
    streams = (
        "tasks.train={directory: tasks, streams: [{name: conversations, weight: 3}, {name: tool_calls, weight: 1}]}"
    )
    words = ["preset=nemotron3_rlvr", "model=m", streams, "rl.schedule.steps=5", "~rl.environments.judge"]
    words += ["rl.curriculum=null", "~rl.environments.graded"]
    words += ["+rl.environments.contains.weight=15", "+rl.environments.tool_calls.weight=1"]

    algorithm = checked_algorithm(compose("rl", words))

    assert isinstance(algorithm, PolicyGradient)
    assert {"instructions", "contains", "tool_calls"} < set(algorithm.environments)
    assert not {"judge", "graded"} & set(algorithm.environments)


def test_tasks_have_the_order_of_the_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"batch": 72, "filters": {"drop_from": 1.0}, "mean_first": 0.8, "mean_last": 0.2}
    words = ["preset=llama_nemotron_grpo", "model=m", "rl.environments.judge.settings.judge.endpoint=e"]
    ordered = [*words, f"tasks.train.curriculum={tmp_path}"]

    with pytest.raises(ValueError, match=r"drop_from=0.75, easy_to_hard=true.* set tasks.train.curriculum=FOLDER"):
        checked_algorithm(compose("rl", [*words, "tasks.train.path=t"]))
    checked_algorithm(compose("rl", ordered))  # an earlier job makes it
    (tmp_path / "curriculum.json").write_text(json.dumps({"settings": settings}))
    with pytest.raises(ValueError, match=r"made with filters.drop_from=1.0, but rl.curriculum.drop_from=0.75"):
        checked_algorithm(compose("rl", ordered))
    checked_algorithm(compose("rl", [*ordered, "rl.curriculum.drop_from=1.0"]))
    checked_algorithm(compose("rl", [*words, "tasks.train.path=t", "rl.curriculum=null"]))
    (tmp_path / "curriculum.json").write_text(json.dumps({"settings": settings | {"mean_last": 0.8}}))
    checked_algorithm(compose("rl", [*ordered, "rl.curriculum.drop_from=1.0", "on_inexpressible=warn"]))
    assert "differs from the preset: tasks.train.curriculum" in capsys.readouterr().err


def test_reprofile_and_adapt_are_checked_before_an_engine_is_loaded() -> None:
    config = compose("rl", ["preset=domyn_math_grpo", "model=m"])
    judged = {**config, "rl": {**config["rl"], "group": {"judge": {"endpoint": "u", "model": "m"}}}}
    every = {"every": 2}
    for given, train, message in (
        (config, {"path": "t", "reprofile": {"platau": 2}}, "did you mean 'plateau'"),
        (config, {"path": "t", "reprofile": {**every, "samples": 0}}, "samples=0"),
        (
            config,
            {"path": "t", "reprofile": {**every, "curriculum": {"sigmo": 1}}},
            "curriculum is invalid .*'sigmo'",
        ),
        (config, {"path": "t", "reprofile": {"plateau": 2}}, "set tasks.validation.path"),
        (judged, {"path": "t", "reprofile": every}, "judge only compares"),
        (config, {"path": "t", "adapt": {}}, r"adapt requires tasks\.train\.directory"),
        (config, {"directory": "t", "adapt": {"keep": 0}}, "keep=0"),
        (config, {"directory": "t", "adapt": {"groups": 0}}, "groups=0"),
    ):
        with pytest.raises(ValueError, match=message):
            checked_algorithm({**given, "tasks": {"train": train}})

    from_an_earlier_job = {"train": {"curriculum": "nowhere", "reprofile": every}}
    checked_algorithm({**config, "tasks": from_an_earlier_job})
