"""What README and docs tell a reader to run does run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.rl.job import checked_algorithm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every fenced block of a language."""
    return [
        (page.name, code) for page in PAGES for code in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)
    ]


IN_ORDER = "checkpoints.md"
"""The page whose commands go on from each other."""


def commands(*, in_order: bool = False) -> list[str]:
    """The `nemo-ext` lines of all shell blocks, comments removed; those of one page, or of all others."""
    lines = [line for page, code in blocks("bash") for line in code.splitlines() if (page == IN_ORDER) == in_order]
    return [re.split(r"\s+# ", line)[0].strip() for line in lines if "nemo-ext " in line]


LONG = ("train", "puzzle", "pipeline")
"""Jobs that train; the last two have tests that run them whole: tests/puzzle/test_job.py, pipeline/test_run.py."""

ELSEWHERE = ("doctor",)
"""A job that imports every engine: tests/test_doctor.py runs the command on this environment."""

QUICK = [
    line
    for line in commands()
    if (shlex.split(line)[1] not in LONG or "--" in line) and shlex.split(line)[1] not in ELSEWHERE
]
CORPORA = ("curate", "train_tokenizer")
"""Jobs that read a whole corpus."""

TRAINING = [line for line in commands() if line not in QUICK and shlex.split(line)[1] == "train"]
OWN_TEXT = [line for line in commands() if "output=data/mine" in line or "streams='{mine: 1}'" in line]
"""README's tokenising of one's own text, and the run on it."""


def run(line: str, folder: Path, *more: str) -> str:
    words = shlex.split(line)
    assert words[0].endswith("nemo-ext")
    command = [sys.executable, "-m", "nemo_ext.cli", *words[1:], *more]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value[:40].splitlines()[0])
def test_python_examples(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which imports Megatron once."""
    monkeypatch.chdir(tmp_path)

    exec(compile(code, page, "exec"), {"__name__": "__main__"})


def takes_seconds(line: str) -> bool:
    """A job on a corpus, or a help, for which Hydra reads all groups; that of `train` stands for all."""
    job, *words = shlex.split(line)[1:]
    return job in CORPORA or ("--help" in words and job != "train")


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.slow if takes_seconds(line) else ()) for line in QUICK]
)
def test_quick_commands(line: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    """In this process: tests/test_wheel.py starts the command."""
    if "docs/" in line:
        shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))

    code, out, err = command(*shlex.split(line)[1:], cwd=tmp_path)

    assert code == 0, err
    assert out or "tokenize" in line


@pytest.mark.parametrize("line", [line for line in QUICK if shlex.split(line)[1] in CORPORA])
def test_commands_on_a_corpus_compose(line: str) -> None:
    job, *words = shlex.split(line)[1:]

    assert compose(job, words)["output"].startswith("data/")


@pytest.mark.slow
def test_rl_commands_for_a_cluster_compose() -> None:
    """Those of the blocks that cannot run here, if they have no placeholders."""
    lines = [line for _, code in blocks("shell") for line in code.replace("\\\n", " ").splitlines()]
    rl = [line for line in lines if line.startswith("nemo-ext rl ") and not re.search(r" \.\.\. |KEY=", line)]
    assert rl
    for line in rl:
        split = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)

        checked_algorithm(compose("rl", split.stdout.split("\0")[2:-1]))


@pytest.mark.deep
def test_one_s_own_text_is_tokenised_and_trained_on(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))
    tokenize, train = OWN_TEXT

    run(tokenize, tmp_path)
    run(train, tmp_path, "train.tokens=32768")

    assert run_directory.read_metrics(tmp_path / "runs" / "mine_text" / "metrics.jsonl")


@pytest.mark.deep
@pytest.mark.xdist_group(name="local_text")
@pytest.mark.parametrize("line", [line for line in TRAINING if line not in OWN_TEXT])
def test_training_commands(
    line: str, launched: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, but stopped after a few steps on data made once, by one worker, and validated on one batch."""
    monkeypatch.chdir(tmp_path)

    launched(*shlex.split(line)[1:], "train.tokens=16384", "megatron.eval_iters=1", f"data_root={ROOT / 'data'}")

    (run_dir,) = (path.parent for path in tmp_path.rglob("report.md"))
    assert run_directory.read_metrics(run_dir / "metrics.jsonl")


@pytest.mark.deep
def test_make_train_in_a_fresh_checkout_and_again(tmp_path: Path) -> None:
    """As written, but for sequences of a quarter of the length."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    command = tmp_path / ".venv" / "bin" / "nemo-ext"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m nemo_ext.cli "$@" megatron.seq_length=64\n')
    command.chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()

    first, second = (
        subprocess.run(["make", "train"], cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
        for _ in range(2)
    )

    assert first.returncode == 0, first.stdout + first.stderr
    (run_dir,) = (path.parent for path in tmp_path.glob("runs/**/report.md"))
    evaluations = [e for e in run_directory.read_metrics(run_dir / "metrics.jsonl") if "val_loss" in e]
    assert evaluations[0]["step"] == 0
    assert evaluations[-1]["val_loss"] < 0.6 * evaluations[0]["val_loss"]
    assert (run_dir / "report.png").stat().st_size > 10_000
    assert second.returncode == 0 and "finished" in second.stdout


def test_a_python_that_is_too_old_is_told_in_one_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo "Python 3.11.7";; *) exit 1;; esac\n')
    old.chmod(0o755)

    ended = subprocess.run(
        ["make", "train", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ended.returncode != 0
    assert ended.stderr.splitlines()[0].startswith("nemo_ext needs Python 3.12 or newer")
    assert "3.11.7" in ended.stderr.splitlines()[0]


@pytest.mark.slow
def test_the_checkpoint_page_runs_from_top_to_bottom(
    launched: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported torch already."""
    import torch
    from safetensors.torch import save_file

    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.checkpoint.formats import choose

    description = from_config(compose("describe", ["model=olmo3_tiny"]))
    found, config = choose(description)
    folder = tmp_path / "models" / "olmo3"
    folder.mkdir(parents=True)
    pairs = [pair for entry in found.entries(description) for pair in zip(entry.names, entry.shapes, strict=True)]
    save_file({name: torch.randn(shape) * 0.05 for name, shape in pairs}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")

    monkeypatch.chdir(tmp_path)
    for line in commands(in_order=True):
        words = shlex.split(line)
        launched(*words[1:], *(["train.tokens=20480"] if words[1] in LONG else []))

    assert (tmp_path / "exports" / "olmo3" / "tokenizer.json").is_file()
    assert (tmp_path / "exports" / "path" / "t0.5" / "model.safetensors").is_file()
    scaling = json.loads((tmp_path / "models" / "olmo3-long" / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 4.0)
