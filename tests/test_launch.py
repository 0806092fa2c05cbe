"""`nemo-ext train` as a user meets it: progress, mistakes, Ctrl-C, kill -9, the same command again.

Ranks and what signals end are processes; a command that starts no rank runs in this one, which imports Megatron once.
"""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext import cli, launch
from nemo_ext.checkpoint import sound
from nemo_ext.job import ranks, run_directory
from nemo_ext.job.config import compose
from nemo_ext.job.files import only_run_in, write_text

pytestmark = pytest.mark.xdist_group(name="launch")
"""Fixtures that train are made once."""

SMALL = (
    "data=mock",
    "train.tokens=2560",
    "megatron.seq_length=32",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=4",
    "megatron.save_interval=5",
    "megatron.eval_interval=10",
    "megatron.eval_iters=1",
    "megatron.num_workers=1",
)
"""Twenty short steps of the tiny Nemotron 3 Nano, a checkpoint every five."""


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nemo_ext.cli", "train", *SMALL, f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(run_dir: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(run_dir, *overrides)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(command: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command in this process, where it starts no rank: its exit code, stdout and stderr."""

    def start_rank(*_: object) -> None:
        raise AssertionError("a rank was started")

    def run_here(run_dir: Path, *overrides: str) -> tuple[int, str, str]:
        monkeypatch.setattr(launch, "_run_ranks", start_rank)
        return command("train", *SMALL, f"run_dir={run_dir}", *overrides)

    return run_here


def losses(run_dir: Path) -> dict[int, float]:
    lines = run_directory.read_metrics(run_dir / run_directory.METRICS)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 900
    while max(losses(run_dir), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run, its parent in this process, and what it printed."""
    run_dir, out = tmp_path_factory.mktemp("whole") / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), suppress(SystemExit):
        patch.setattr(sys, "argv", ["nemo-ext", "train", *SMALL, f"run_dir={run_dir}"])
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as if torchrun had started the command
        cli.main()
    return run_dir, out.getvalue()


def test_ranks_import_no_package_that_megatron_would_only_try(uninterrupted: tuple[Path, str]) -> None:
    log = (uninterrupted[0] / run_directory.LOG).read_text()
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", log, re.MULTILINE))

    assert {"megatron.training.training", "tensorboard"} <= imported
    # Of a refused package, Python still reports the first levels of the attempt.
    assert not {"boto3.session", "modelopt.torch.utils", "transformers.utils.hub", "wandb.sdk"} & imported
    assert "hydra" not in imported


def test_a_run_leaves_config_versions_metrics_log_and_a_report_with_a_plot(uninterrupted: tuple[Path, str]) -> None:
    run_dir, out = uninterrupted

    for name in ("config.yaml", "versions.json", "metrics.jsonl", "train.log", "report.md", "report.png"):
        assert (run_dir / name).stat().st_size > 0
    assert "report.png" in (run_dir / "report.md").read_text()
    assert "step 20/20" in out and "report:" in out
    evaluations = [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "val_loss" in line]
    assert [line["step"] for line in evaluations[:2]] == [10, 20]


def test_a_run_learns_and_logs_every_step(uninterrupted: tuple[Path, str]) -> None:
    run_dir, _ = uninterrupted
    lines = [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]

    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["tokens"] for line in lines] == [128 * step for step in range(1, 21)]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    for line in lines:
        assert line["lr"] > 0 and line["grad_norm"] > 0 and line["tokens_per_second"] > 0 and 0 < line["mfu"] < 2
    # Constant after the warm-up, then WSD's decay over the last fifth: the last step is at the minimum.
    rates = [line["lr"] for line in lines]
    assert rates[1:16] == pytest.approx([2e-3] * 15) and rates[-1] == pytest.approx(2e-5)


def test_the_same_command_again_has_nothing_to_do(uninterrupted: tuple[Path, str], here: Here) -> None:
    run_dir, _ = uninterrupted
    before = losses(run_dir)

    code, out, err = here(run_dir)

    assert code == 0, err
    assert "finished: step 20 of 20" in out
    assert losses(run_dir) == before


@pytest.mark.deep
def test_a_finished_run_can_be_made_longer(
    uninterrupted: tuple[Path, str], launched: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted[0], tmp_path / "run")

    out = launched("train", *SMALL, f"run_dir={tmp_path / 'run'}", "train.tokens=3200")

    assert "from step 20" in out and "megatron.train_iters: 20 -> 25" in out
    assert sorted(losses(tmp_path / "run")) == list(range(1, 26))


@pytest.mark.slow
def test_a_rank_that_fails_shows_its_own_last_words_and_code_1(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", "megatron.lr=1e30", "megatron.clip_grad=0")

    assert code == 1
    assert "a rank failed" in err and "nan" in err.lower()
    assert "torch/distributed/elastic" not in err


def test_another_model_is_not_trained_into_the_same_directory(uninterrupted: tuple[Path, str], here: Here) -> None:
    run_dir, _ = uninterrupted

    code, _, err = here(run_dir, "model.pattern=M-")
    size_code, _, size_err = here(run_dir, "megatron.hidden_size=96")

    assert code == 2
    assert "model.pattern" in err and "run_dir" in err
    assert size_code == 2 and "other sizes" in size_err


@pytest.mark.slow
def test_stopped_by_ctrl_c_then_killed_it_goes_on_exactly(
    uninterrupted: tuple[Path, str], launched: Callable[..., str], tmp_path: Path
) -> None:
    run_dir, whole = tmp_path / "run", losses(uninterrupted[0])
    seed = random.randrange(10_000)

    process = start(run_dir)
    wait_for_step(run_dir, random.Random(seed).randint(1, 5))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=900)

    saved = run_directory.last_checkpoint(run_dir)
    assert process.returncode == 130
    assert saved is not None and saved == max(losses(run_dir)), f"seed {seed}"
    assert "exiting program after receiving SIGTERM" in (run_dir / run_directory.LOG).read_text()
    assert f"at step {saved}" in out

    process = start(run_dir)
    wait_for_step(run_dir, saved + random.Random(seed).randint(1, 5))
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for victim in family:
        victim.kill()
    out, _ = process.communicate()
    psutil.wait_procs(family, timeout=60)
    assert f"resuming {run_dir} from step {saved}" in out, f"seed {seed}"

    saved = run_directory.last_checkpoint(run_dir)
    out = launched("train", *SMALL, f"run_dir={run_dir}")
    assert f"from step {saved}" in out, f"seed {seed}"
    assert losses(run_dir) == pytest.approx(whole, rel=1e-6), f"seed {seed}"


FASTER = """
import time

began, real = time.time(), time.time
time.time = lambda: began + 20 * (real() - began)
"""


@pytest.mark.deep
def test_exit_duration_saves_and_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron counts in whole minutes, so every process has a clock that is twenty times as fast."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(FASTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clock"))

    code, _, err = run(
        tmp_path / "run", "megatron.exit_duration_in_mins=1", "megatron.save_interval=100000", "train.tokens=1e9"
    )

    assert code == 0, err
    assert run_directory.last_checkpoint(tmp_path / "run") == max(losses(tmp_path / "run"))
    assert "(not finished)" in (tmp_path / "run" / "report.md").read_text()


def test_two_runs_do_not_share_a_directory(tmp_path: Path, here: Here) -> None:
    with only_run_in(tmp_path / "run"):
        code, _, err = here(tmp_path / "run")

    assert code == 2
    assert "another run is using this directory" in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["megatron.moe_router_topkk=2"], "did you mean 'moe_router_topk'"),
        (["megatron.tensor_model_parallel_size=3"], "not divisible by TP x PP x CP = 3"),
        (["model.pattern=MEX"], "^"),
        (["data=local_text", "data.tokenizer={kind: huggingface, path: /nowhere/tokenizer.json}"], "/nowhere"),
        (["data=local_text", "data.streams=[{name: a, weight: 1, prefix: /nowhere/a}]"], "/nowhere/a_train.idx"),
        (["launcher.nodes=2"], "scale=laptop"),
        (["recipe=olmo3/7b_pretrian"], "did you mean 'olmo3/7b_pretrain'?"),
        (["train.token=3"], "token"),
        (["megatron.swiglu=3"], "megatron.swiglu: expected true or false"),
        (["megatron.log_throughput=3"], "switch"),
        (["+model.qk_norm_scop=width"], "did you mean 'qk_norm_scope'?"),
        (["train.validate_at_start=maybe"], "valid boolean"),
        (["launcher.nproc_per_node=0"], "greater than or equal to 1"),
        (["model.backend=transformer_engine", "megatron.no_rope_fusion=true"], "Transformer Engine is not installed"),
        (["megatron.pretrained_checkpoint=/nowhere"], "/nowhere: no such directory"),
        (
            ["megatron.tensor_model_parallel_size=2", "launcher.nproc_per_node=2"],
            "only with megatron.sequence_parallel=true",
        ),
        (["megatron.load=/somewhere"], "pretrained_checkpoint"),
        (["megatron.reset_attention_mask=true"], "would have no effect"),
        (["megatron.defer_embedding_wgrad_compute=true"], "is not supported by Megatron's HybridModel"),
        (
            ["model.pattern=M-|*E", "megatron.pipeline_model_parallel_size=2", "launcher.nproc_per_node=2"],
            "pipeline rank 0 has no MoE block",
        ),
        (["megatron.spec=[a,b]"], "model.pattern determines the layer spec"),
    ],
)
def test_a_mistake_is_one_clear_error_before_anything_starts(
    tmp_path: Path, here: Here, overrides: list[str], message: str
) -> None:
    code, _, err = here(tmp_path / "run", *overrides)

    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / run_directory.LOG).exists()


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks.rank_environment(2)["OMP_NUM_THREADS"] == "4"

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ranks.rank_environment(2)["OMP_NUM_THREADS"] == "3"


def fake_ranks(monkeypatch: pytest.MonkeyPatch, *ends: int) -> list[dict[str, Any]]:
    """Ranks that end at these steps, one after the other; the configs that they were given."""
    given: list[dict[str, Any]] = []
    steps = iter(ends)

    def ranks(run_dir: Path, *others: object) -> None:
        given.append(run_directory.read_config(run_dir / run_directory.CONFIG))
        tracker = run_dir / run_directory.CHECKPOINTS / "latest_checkpointed_iteration.txt"
        write_text(tracker, str(next(steps)))

    monkeypatch.setattr(launch, "_run_ranks", ranks)
    monkeypatch.setattr(sound, "fall_back", lambda checkpoints: None)  # there are no checkpoints behind the tracker
    monkeypatch.setattr("nemo_ext.megatron.report.write_report", lambda run_dir: run_dir)
    return given


PHASES = ("phases.a={tokens: 1920}", "phases.b={tokens: 1920, megatron: {seq_length: 16, global_batch_size: 8}}")


def test_a_segment_that_ends_early_is_not_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fake_ranks(monkeypatch, 6, 15, 30)
    words = [*SMALL, "train.tokens=3840", f"run_dir={tmp_path}", *(f"+{word}" for word in PHASES)]

    launch.train(compose("train", words))

    assert [each["segment"]["phases"] for each in given] == [["a"]]
    assert "ended at step 6 of 15 (see train.log); the same command resumes" in capsys.readouterr().out
    launch.train(compose("train", words))
    assert [each["segment"]["phases"] for each in given] == [["a"], ["a"], ["b"]]
    assert "ended at step" not in capsys.readouterr().out


def test_the_blend_of_the_first_start_is_that_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("x", 4), ("y", 8)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{n} {"word " * 40}"}}\n' for n in range(count)))
    sources = {name: {"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")} for name in "xy"}
    of = {name: {"source": source, "tokens": 1_000_000} for name, source in sources.items()}
    data = {"directory": str(tmp_path / "data"), "tokenizer": {"kind": "byte"}, "workers": 1, "validation_share": 0.3}
    data["blend"] = {"by": "temperature", "alpha": 1.0, "of": of}
    given = fake_ranks(monkeypatch, 5, 10, 15)

    for start in range(3):
        if start == 2:
            (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{n} {"other " * 30}"}}\n' for n in range(6)))
        config = compose("train", [*SMALL, f"run_dir={tmp_path / 'run'}", "train.tokens=15360"])
        for name in ("mock_data", "tokenizer_type", "vocab_size"):
            config["megatron"].pop(name)
        launch.train({**config, "data": deepcopy(data)})
        printed = capsys.readouterr()
        assert "data: some streams are read more than max_epochs=4 times" in printed.err
        changed = re.findall(r"changed since this run began: the data in (\S+),", printed.out)
        assert changed == [str(tmp_path / "data" / f"x_{split}") for split in ("train", "valid")] * (start == 2)

    first, second = (each["megatron"]["train_data_path"] for each in given[:2])
    assert first == second and float(first[0]) < 0.5


def test_a_cluster_run_is_checked_against_what_its_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(monkeypatch, 5)
    launch.train(compose("train", [*SMALL, f"run_dir={tmp_path}"]))
    before = (tmp_path / run_directory.CONFIG).read_text()

    with pytest.raises(ValueError, match="holds a run of a model with other sizes"):
        launch.prepare(compose("train", [*SMALL, f"run_dir={tmp_path}", "megatron.hidden_size=96"]))

    assert (tmp_path / run_directory.CONFIG).read_text() == before
    launch.prepare(compose("train", [*SMALL, f"run_dir={tmp_path}", "megatron.position_embedding_type=rope"]))


def test_a_run_prepared_by_hand_skips_the_step_at_which_the_guard_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ranks(monkeypatch, 5)
    config = compose("train", [*SMALL, f"run_dir={tmp_path}", "guard.nan=true"])
    launch.train(config)
    event = {"step": 4, "what": "nan", "skipped": [4, 4], "at": 0.0}
    (tmp_path / "guard.json").write_text(json.dumps([event]))

    with pytest.raises(ValueError, match="holds a run of a model with other sizes"):
        launch.prepare(compose("train", [*SMALL, f"run_dir={tmp_path}", "guard.nan=true", "megatron.hidden_size=96"]))
    path = launch.prepare(config)

    assert "guard: nan at step 4; resuming from step 0" in capsys.readouterr().out
    assert run_directory.read_config(path)["megatron"]["iterations_to_skip"] == [4]


def test_a_resumed_run_keeps_its_rounding_and_says_that_its_plan_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ranks(monkeypatch, 5)
    rounded = [*SMALL, f"run_dir={tmp_path}", "train.quantization_aware=true"]
    launch.train(compose("train", [*rounded, "precision=fp8_current"]))

    with pytest.raises(ValueError, match=r"holds a run with train\.quantization_aware=true: set it to that value"):
        launch.prepare(compose("train", [*SMALL, f"run_dir={tmp_path}"]))
    capsys.readouterr()
    launch.prepare(compose("train", [*rounded, "precision=fp8_current", "precision_plan.kv_cache=fp8"]))
    assert 'changed since this run began: precision_plan.kv_cache: null -> "fp8"' in capsys.readouterr().out


def test_help_and_cfg_do_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from nemo_ext.cli import main\n"
        "for words in (['--help'], ['--cfg', 'job']):\n"
        "    sys.argv = ['nemo-ext', 'train', *words]\n"
        "    try:\n        main()\n    except SystemExit as exit_:\n        assert not exit_.code\n"
        "    print('END')\n"
        "assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert all("megatron" in printed for printed in ended.stdout.split("END\n")[:2])


def test_the_script_is_the_command(command: Callable[..., Any], tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).parents[1] / "launchers" / "train.py"), "--cfg", "job"]
    script = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)

    assert script.stdout == command("train", "--cfg", "job", cwd=tmp_path).stdout
    assert os.listdir(tmp_path) == []
