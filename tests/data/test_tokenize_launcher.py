import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import launchers
import nemo_ext
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.manifest import read_manifest
from nemo_ext.job.job import JobFailed

ROOT = Path(nemo_ext.__file__).parents[1]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from nemo_ext.cli import main; main()"

Write = Callable[..., Source]
Command = Callable[..., Any]


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """Function that runs `nemo-ext tokenize` with invalid arguments and returns its single line of errors."""

    def run(*words: str, cwd: Path) -> str:
        ended = command("tokenize", *words, cwd=cwd)
        assert (ended.returncode, ended.stdout) == (2, "")
        (line,) = ended.stderr.splitlines()
        return line

    return run


def test_help_and_the_composed_config_do_not_need_torch(tmp_path: Path, command: Command) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH, "tokenize", "data=local_text", "--cfg", "job"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    composed = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    shown = command("tokenize", "--help", cwd=tmp_path)

    assert (shown.returncode, shown.stderr) == (composed.returncode, composed.stderr) == (0, "")
    for key in ("input", "output", "kind", "text_key", "tokenizer", "validation_share", "workers", "data"):
        assert f"\n  {key} " in shown.stdout, f"{key} is not explained"
    assert "input: null\n" in composed.stdout
    (whole,) = re.findall(r"'(tokenizer=\{.*\})'", shown.stdout)
    value = OverridesParser.create().parse_override(whole).value()
    assert isinstance(value, dict) and value["eod"] == "<|endoftext|>"
    assert "kind: python_stdlib" in composed.stdout


def test_a_file_is_tokenised_once(
    tmp_path: Path, jsonl: Write, texts_of: Callable[[int], list[str]], command: Command
) -> None:
    jsonl(tmp_path / "texts.jsonl", [*texts_of(60), "twice", "twice"])
    words = ("tokenize", "input=texts.jsonl", "output=made/mine", "validation_share=0.2", "workers=1")

    first = command(*words, cwd=tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    second = command(*words, cwd=tmp_path)

    manifest = read_manifest(tmp_path / "made/mine")
    assert (first.returncode, first.stdout) == (second.returncode, second.stdout) == (0, "")
    assert (
        first.stderr
        == f"mine: {manifest.contents()}; skipped 1 duplicate; made/mine_*.bin and .idx, documents end with id 256\n"
    )
    assert second.stderr == f"mine: already tokenised: {manifest.contents()}\n"
    assert sorted(before) == ["mine.json", "mine_train.bin", "mine_train.idx", "mine_valid.bin", "mine_valid.idx"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "texts.jsonl"], "Hydra wrote files"


def test_the_launcher_runs_as_a_script_with_workers(tmp_path: Path, bpe_file: Path, jsonl: Write) -> None:
    # A script's folder is on Python's path, where this tokenize.py could shadow the standard library's.
    jsonl(tmp_path / "texts.jsonl", ["a", "b", "c"])
    script = Path(launchers.__file__).parent / "tokenize.py"
    stream = "{name: own, weight: 1, source: {kind: jsonl, path: texts.jsonl}}"
    words = [f"data.directory={tmp_path}", f"data.streams=[{stream}]", f"tokenizer={bpe_file}", "workers=2"]

    ended = subprocess.run([sys.executable, script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("own: 3 documents (")
    assert read_manifest(tmp_path / "own").tokenizer["path"] == str(bpe_file)


def test_a_data_file_with_megatron_keys_composes(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert refused("data=olmo1_dolma", cwd=tmp_path).startswith("error: no stream of this blend has a source")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no text is given: set input=FILE and output=PREFIX"),
        (["input=nowhere.jsonl", "output=x"], "error: stream 'x': jsonl source: file nowhere.jsonl does not exist"),
        (["input=a.jsonl", "output=x", "tokenizer=a.jsonl"], "error: tokenizer: a.jsonl is not a tokenizer.json"),
        (["input=a.jsonl", "output=a.jsonl/x"], "error: tokenising a.jsonl/x failed ([Errno 20] Not a directory"),
    ],
)
def test_invalid_arguments_give_one_line_and_exit_code_2(
    tmp_path: Path, words: list[str], message: str, refused: Callable[..., str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")

    assert refused(*words, cwd=tmp_path).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted: the same command resumes\n"),
        (JobFailed("a worker died"), 1, "error: a worker died\n"),
    ],
)
def test_an_interrupted_or_failed_run_gives_one_line(
    tmp_path: Path, raised: BaseException, code: int, message: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")

    def fail(blend: object, **settings: object) -> None:
        raise raised

    monkeypatch.setattr("nemo_ext.data.tokenize.tokenize_blend", fail)

    ended = command("tokenize", "input=a.jsonl", "output=x", cwd=tmp_path)

    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", message)


def test_an_unknown_option_gives_exit_code_2(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "Could not override 'inptu'" in refused("inptu=a.jsonl", cwd=tmp_path)
