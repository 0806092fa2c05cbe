"""Jobs on Slurm that serve their own models: training in rounds, and evaluation of averages."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint import hf
from nemo_ext.job.config import compose
from nemo_ext.job.registry import job as find
from nemo_ext.slurm import attempts
from nemo_ext.slurm.batch import own_words
from nemo_ext.slurm.jobs import makes, nodes_and_gpus
from nemo_ext.slurm.preflight import findings
from nemo_ext.slurm.settings import settings_of
from nemo_ext.slurm.status import status_of
from nemo_ext.slurm.submit import planned

ONLINE = ("job=online", "preset=rpo_online", "cluster=leonardo")
SWEEP = ("job=merge_sweep", "from=[a,b]", "cluster=leonardo", "suite=suite.yaml")


def errors(*words: str, coming: tuple[Path, ...] = ()) -> list[str]:
    submission = planned(words)
    found = findings(submission.config, submission.settings, coming=coming)
    return [one.text for one in found if one.kind == "error"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A suite of a few sums, in the test's working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text("generator: arithmetic\ncount: 10\nmax_tokens: 4\n")
    file = tmp_path / "suite.yaml"
    file.write_text(f"benchmarks: [{tmp_path / 'sums.yaml'}]\n")
    return file


@pytest.fixture
def two(random_llama: Path, tmp_path: Path) -> str:
    """Two models of one kind, as in the key `from`."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        shutil.copytree(random_llama, folder)
    weights = load_file(folders[1] / "model.safetensors")
    save_file({name: one + 0.01 for name, one in weights.items()}, folders[1] / "model.safetensors", {"format": "pt"})
    return f"from=[{folders[0]},{folders[1]}]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*ONLINE, "model=m", "tasks.train.path=t"), ["model=m: not found", "tasks.train.path=t: not found"]),
        (
            ("job=online", "preset=rl_zero", "model=m"),
            ["preset=rl_zero does not train on pairs"],
        ),
        ((*ONLINE, "model=m", "tasks.train.path=t", "serving.nodes=2"), ["serving.nodes=2: job=online serves"]),
        ((*ONLINE, "model=m", "tasks.train.path=t", "online.colour=1"), ["online has no such key"]),
        (SWEEP, ["from=a: not found", "from=b: not found"]),
        ((*SWEEP, "sweep.at_least={sum: 0.1}"), ["sweep.at_least: unknown name 'sum'"]),
        ((*SWEEP, "serving.gpus=8", "serving.replicas=2"), ["serving.gpus=8: a node of leonardo has 4", "replicas=2"]),
    ],
)
def test_mistakes_are_reported_before_submission(suite: Path, words: tuple[str, ...], said: list[str]) -> None:
    try:
        found = errors(*words)
    except ValueError as error:
        found = [str(error)]

    for text in said:
        assert any(text in one for one in found), found


def test_checkpoints_of_two_models_are_not_averaged(two: str, suite: Path, tmp_path: Path) -> None:
    assert not errors(*SWEEP, two, f"run_dir={tmp_path / 'run'}")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 64}))

    (said,) = errors(*SWEEP, two, f"run_dir={tmp_path / 'run'}")
    assert "hidden_size" in said
    assert not (tmp_path / "run").exists(), "looking leaves nothing"


@pytest.mark.slow
def test_megatrons_checkpoints_are_opened_before_submission(
    two: str, suite: Path, tmp_path: Path, random_llama: Path
) -> None:
    """They are opened if they exist and no earlier job makes them."""
    settings = hf.Settings()
    plans = [hf.plan(tmp_path / name, tmp_path / f"{name}_megatron", settings) for name in "ab"]
    made = [hf.convert(each, settings, progress=False) for each in plans]
    words = (*SWEEP, f"from=[{made[0]},{made[1]}]", f"run_dir={tmp_path / 'run'}")
    assert not errors(*words)
    shutil.rmtree(made[1] / "release")

    (said,) = errors(*words)
    assert "b_megatron" in said
    assert not errors(*words, coming=(made[1],))
    (said,) = errors(*SWEEP, f"from=[{made[0]},{random_llama}]", f"run_dir={tmp_path / 'run'}")
    assert "convert them to one format with `nemo-ext convert` first" in said
    assert not (tmp_path / "run").exists(), "looking leaves nothing"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("job", [ONLINE, ("job=rl", "preset=dpo_delta", "engine=trl", "pairs.train=p", ONLINE[-1])])
def test_arguments_that_trl_does_not_have_are_named_before_submission(job: tuple[str, ...], letter_tasks: Path) -> None:
    words = (*job, "model=m", "rl.schedule.steps=2")
    words = (*words, f"tasks.train.path={letter_tasks}") if job is ONLINE else words

    assert not [one for one in errors(*words, "trl.max_grad_norm=1.0") if one.startswith("trl")]
    assert any(
        one.startswith("trl: unknown key 'max_gradnorm': did you mean 'max_grad_norm'")
        for one in errors(*words, "trl.max_gradnorm=1.0")
    )


def test_stages_that_follow_each_other(random_llama: Path, suite: Path, tmp_path: Path) -> None:
    """Only tasks and models of earlier stages may be missing; the next stage finds their outputs."""
    tasks = tmp_path / "coming" / "tasks.jsonl"
    words = (*ONLINE, f"model={tmp_path}/coming/hf", f"tasks.train.path={tasks}", f"run_dir={tmp_path}/online")

    assert not errors(*words, coming=(tmp_path / "coming",))
    assert any("min_margin=-1" in one for one in errors(*words, "online.min_margin=-1", coming=(tmp_path / "coming",)))
    made = makes("online", planned(words).config)
    sweep = planned([*SWEEP, f"from=[{tmp_path}/online/model,{random_llama}]"])
    assert [read.key for read in find("merge_sweep").inputs(sweep.config)] == ["from", "from"]
    assert not [one for one in findings(sweep.config, sweep.settings, coming=made) if one.kind == "error"]


def test_a_model_is_served_on_one_node() -> None:
    settings = settings_of(["job=online", "cluster=leonardo"])
    for words, gpus in ((), 1), (("serving.gpus=4",), 4), (("serving.device=cpu",), 0):
        config = compose("online", ["preset=rpo_online", "model=m", *words])
        assert nodes_and_gpus("online", config, settings) == (1, gpus)
    assert own_words("online", ["model=m"], {}) == ["model=m"]


def test_status_counts_rounds(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("online: {}\nrl: {schedule: {steps: 50}, online: {rounds: 3}}\n")
    lines = ({"rounds": 0, "reward": 0.1, "loss": 0.6}, {"rounds": 1, "reward": 0.2, "loss": 0.5}, {"rounds": 2})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    found = status_of(tmp_path, {})

    assert (found.step, found.target, found.loss) == (2, 3, 0.5)


def outputs(folder: Path) -> str:
    return "".join(f"{path}\n{path.read_text(errors='replace')[-3000:]}" for path in folder.rglob("*.out"))


def over(run_dir: Path) -> bool:
    """Whether the run is finished or given up; asking `status` takes a second of a core each time."""
    starts = attempts.read(run_dir)
    return attempts.finished(run_dir) is not None or bool(starts and starts[-1].given_up)


def reasons(run_dir: Path) -> list[str]:
    """How the starts ended."""
    return [each.reason for each in attempts.read(run_dir)]


CPU = ("cluster=testbed", "serving.device=cpu", 'slurm.options=["--cpus-per-task=1"]')


@pytest.mark.deep
@pytest.mark.slurm
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_rounds_resume_after_a_time_limit(
    slurm: Any, nemo_ext: Callable[..., str], speaker: Path, letter_tasks: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "online"
    words = ("job=online", "preset=rpo_online", f"model={speaker}", f"tasks.train.path={letter_tasks}")
    small = (
        *("rl.batch=2", "micro_batch=2", "rl.lengths={prompt: 256, total: 288}", "rl.schedule.steps=2"),
        *("rl.online={generations_per_prompt: 4, rounds: 1}", "evaluate.draws=50", "online.prompts=32"),
    )
    given = (*words, *small, *CPU, f"run_dir={run_dir}", "memory_profile=null")

    nemo_ext("submit", *given)
    job = (run_dir / "slurm" / "job").read_text().strip()
    slurm.wait(lambda: (run_dir / "rounds/1/answers/generations.jsonl").is_file(), what=lambda: outputs(run_dir))
    first = (run_dir / "rounds/1/answers/generations.jsonl").read_bytes()
    slurm.call("scancel", "--batch", "--signal=USR2", job)  # like Slurm before the time limit
    slurm.wait(lambda: over(run_dir), what=lambda: outputs(run_dir), seconds=400)

    assert reasons(run_dir) == ["time limit (SIGUSR2)", "done"], outputs(run_dir)
    assert (run_dir / "rounds/1/answers/generations.jsonl").read_bytes() == first, "nothing is answered twice"
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert "1 / 1" in nemo_ext("status", str(run_dir))


@pytest.mark.deep
@pytest.mark.slurm
def test_averages_are_evaluated(
    slurm: Any, nemo_ext: Callable[..., str], two: str, suite: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "sweep"
    given = ("job=merge_sweep", two, f"suite={suite}", f"run_dir={run_dir}", "sweep.points=[0,0.5]", *CPU)

    nemo_ext("submit", *given, "evaluate.draws=50")
    job = (run_dir / "slurm" / "job").read_text().strip()
    slurm.wait(lambda: (run_dir / "evaluations/t0/.job/evaluated.json").is_file(), what=lambda: outputs(run_dir))
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    slurm.wait(lambda: over(run_dir), what=lambda: outputs(run_dir), seconds=400)

    assert reasons(run_dir) == ["time limit (SIGUSR2)", "done"], outputs(run_dir)
    assert {one["name"] for one in json.loads((run_dir / "front.json").read_text())} == {"t0", "t0.5"}
    assert (run_dir / "chosen" / "model.safetensors").is_file()
    output = (run_dir / "slurm" / f"{job}.out").read_text()
    assert output.count("/a on this machine during the job") == 1, "only what was not evaluated is served again"
