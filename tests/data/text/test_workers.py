import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import nemo_ext
from nemo_ext.data import tokenize
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from nemo_ext.data.tokenize import tokenize_stream

ROOT = str(Path(nemo_ext.__file__).parents[1])

SCRIPT = """
import sys
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer

if __name__ == "__main__":
    source = load_source({"kind": "jsonl", "path": sys.argv[1]})
    tokenizer = HuggingFaceTokenizer(sys.argv[2])
    tokenize_stream(source, tokenizer, sys.argv[3], workers=int(sys.argv[4]), documents_per_shard=40)
"""

Write = Callable[..., Source]
Draw = Callable[[int], list[str]]
Files = Callable[[Path], dict[str, bytes]]


def test_the_files_do_not_depend_on_workers_or_shards(
    tmp_path: Path, bpe_file: Path, jsonl: Write, texts_of: Draw, files_of: Files
) -> None:
    texts = texts_of(120) + texts_of(20)
    source = jsonl(tmp_path / "in.jsonl", texts, max_bytes=60_000)
    outputs = []
    for workers, documents_per_shard in ((1, 10**9), (1, 7), (2, 13)):
        prefix = tmp_path / f"{workers}-{documents_per_shard}" / "out"
        manifest = tokenize_stream(
            source,
            HuggingFaceTokenizer(bpe_file),
            prefix,
            workers=workers,
            documents_per_shard=documents_per_shard,
            progress=False,
        )
        outputs.append({name: content for name, content in files_of(prefix).items() if name != ".json"})
        assert manifest.reached_max_bytes
        assert sum(counts.text_bytes for counts in manifest.splits.values()) <= 60_000

    assert sorted(outputs[0]) == ["_train.bin", "_train.idx", "_valid.bin", "_valid.idx"]
    assert all(output == outputs[0] for output in outputs[1:])


def stop_in_the_middle(
    tmp_path: Path, bpe_file: Path, prefix: Path, stop: Callable[[subprocess.Popen[bytes]], None]
) -> int:
    """Start tokenising in a separate process, stop it after its first shards; returns the number of finished shards."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with open(tmp_path / "stderr", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, script, tmp_path / "in.jsonl", bpe_file, prefix, "2"],
            env=os.environ | {"PYTHONPATH": ROOT},
            stderr=errors,
            start_new_session=True,
        )
    shards = Path(f"{prefix}.shards")
    deadline = time.monotonic() + 300
    while len(list(shards.glob("*.npz"))) < 3:
        assert process.poll() is None, "the process ended before it could be stopped"
        assert time.monotonic() < deadline, "no shards after five minutes"
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    stop(process)
    process.wait(timeout=300)
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive, "workers outlived their parent"
    assert not Path(f"{prefix}.json").exists()
    return len(list(shards.glob("*.npz")))


@pytest.mark.parametrize(
    "how", [pytest.param("kill -9", marks=pytest.mark.slow), pytest.param("ctrl-c", marks=pytest.mark.deep)]
)
def test_a_stopped_run_resumes_and_gives_the_same_files(
    tmp_path: Path, bpe_file: Path, how: str, jsonl: Write, texts_of: Draw, files_of: Files
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(2000))
    tokenizer = HuggingFaceTokenizer(bpe_file)
    tokenize_stream(source, tokenizer, tmp_path / "whole/out", workers=1, progress=False)
    stops: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
        "kill -9": lambda process: process.kill(),
        "ctrl-c": lambda process: os.killpg(process.pid, signal.SIGINT),
    }

    finished = stop_in_the_middle(tmp_path, bpe_file, tmp_path / "stopped/out", stops[how])
    assert 3 <= finished < 50
    tokenize_stream(source, tokenizer, tmp_path / "stopped/out", workers=1, documents_per_shard=40, progress=False)

    assert files_of(tmp_path / "stopped/out") == files_of(tmp_path / "whole/out")
    assert len(os.listdir(tmp_path / "stopped")) == 5, "unfinished files remain"


def test_input_that_grows_while_it_is_read_is_an_error(
    tmp_path: Path, jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["early", "too"])
    complete = tokenize.complete_shards

    def meanwhile(*arguments: Any, **others: Any) -> int:
        count = complete(*arguments, **others)
        with open(tmp_path / "in.jsonl", "a") as file:
            file.write('{"text": "late"}\n')
        return count

    monkeypatch.setattr(tokenize, "complete_shards", meanwhile)

    with pytest.raises(ValueError, match=r"input files of .*out changed while they were read"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    assert not list(tmp_path.glob("out*"))


def test_an_error_in_a_worker_reaches_the_caller(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"good" if number < 4 else b"\xff")
    source = load_source({"kind": "text", "path": str(tmp_path / "*.txt")})

    with pytest.raises(ValueError, match=r"4\.txt: byte 0\)\); convert it to UTF-8"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=2, documents_per_shard=1)


def test_ctrl_c_while_workers_start_reaches_none_of_them(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal\n"
        "from nemo_ext.job.workers import in_workers\n"
        "if __name__ == '__mp_main__':\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"  # a worker that has not reached prepare_worker yet
        "if __name__ == '__main__':\n"
        "    print(sorted(result for _, result in in_workers(abs, range(-3, 0), workers=2)))\n"
        "    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
    )

    ended = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=300
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[1, 2, 3]\nset()\n", "")


def test_a_main_script_that_workers_cannot_import_is_explained(tmp_path: Path, jsonl: Write) -> None:
    jsonl(tmp_path / "in.jsonl", ["a", "b"])
    script = f"""
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.data.text.tokenizers import ByteTokenizer
source = load_source({{"kind": "jsonl", "path": {str(tmp_path / "in.jsonl")!r}}})
tokenize_stream(source, ByteTokenizer(), {str(tmp_path / "out")!r}, workers=2)
"""

    ended = subprocess.run(
        [sys.executable, "-"], input=script, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True
    )

    assert ended.returncode != 0
    assert "JobFailed: a worker process died" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr
