import gzip
import json
import mmap
from pathlib import Path

import numpy as np
import pytest

from nemo_ext.data.curriculum import write
from nemo_ext.data.curriculum.prompts import Prompts, read_prompts
from nemo_ext.data.curriculum.records import unpacked
from nemo_ext.data.curriculum.settings import PromptKeys
from nemo_ext.data.curriculum.write import write_ordered


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    """A thousand prompts of different lengths in two files, one of them compressed."""
    lines = [
        json.dumps({"id": n, "prompt": "x" * (n % 97), "domain": "ab"[n % 2]}).encode() + b"\n" for n in range(1000)
    ]
    (tmp_path / "plain.jsonl").write_bytes(b"".join(lines[:600]))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[600:])))
    files = unpacked([tmp_path / "plain.jsonl", tmp_path / "packed.jsonl.gz"], tmp_path)
    return read_prompts(files, PromptKeys())


def test_records_that_do_not_fit_into_memory_are_written_alike(
    prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).integers(0, 1000, 3000)
    monkeypatch.setattr(write, "ROWS", 128)

    write_ordered(prompts, rows, tmp_path / "mapped.jsonl")
    write_ordered(prompts, rows, tmp_path / "buckets.jsonl", memory=10_000)

    written = (tmp_path / "mapped.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in written] == rows.tolist()
    assert (tmp_path / "buckets.jsonl").read_bytes() == (tmp_path / "mapped.jsonl").read_bytes()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing is left behind"


def test_many_files_and_empty_ones_give_the_same_output_as_few(
    prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [line for file in prompts.files for line in file.read_bytes().splitlines(keepends=True)]
    files = [tmp_path / f"{number:02}.jsonl" for number in range(21)]
    for number, file in enumerate(files):
        file.write_bytes(b"".join(records[number * 50 : number * 50 + 50]))  # the last is empty
    monkeypatch.setattr(write, "MOST_OPEN", 4)
    monkeypatch.setattr(write, "ROWS", 128)
    opened: list[int] = []
    mapped = mmap.mmap
    monkeypatch.setattr(write.mmap, "mmap", lambda *args, **more: opened.append(args[0]) or mapped(*args, **more))
    many, rows = read_prompts(files, PromptKeys()), np.random.default_rng(0).integers(0, 1000, 3000)

    write_ordered(many, rows, tmp_path / "many")

    assert len(opened) == 20, "each file once, from front to back"
    assert [json.loads(line)["id"] for line in (tmp_path / "many").read_text().splitlines()] == rows.tolist()
    write_ordered(read_prompts([files[20], files[0]], PromptKeys()), np.arange(50), tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == files[0].read_bytes()


def test_one_file_per_domain(prompts: Prompts, tmp_path: Path) -> None:
    rows = np.arange(999, -1, -1)

    write_ordered(prompts, rows, tmp_path / "all", domain_files={0: tmp_path / "a", 1: tmp_path / "b"})

    whole = (tmp_path / "all").read_text().splitlines()
    assert (tmp_path / "a").read_text().splitlines() == [line for line in whole if '"a"' in line]
    assert (tmp_path / "b").read_text().splitlines() == [line for line in whole if '"b"' in line]


def test_lines_between_prompts_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    record = '  {{"id": {}, "prompt": "p"}}'
    path.write_text(f"\n{record.format(0)}\r\nnonsense\n{record.format(0)}\n \n{record.format(1)}", newline="")
    prompts = read_prompts([path], PromptKeys(), max_bad_share=0.5)

    for memory in (None, 1):
        write_ordered(prompts, np.array([1, 0, 1, 1]), tmp_path / "written", memory=memory)
        assert (tmp_path / "written").read_bytes().decode() == "".join(f"{record.format(n)}\n" for n in (1, 0, 1, 1))


def test_a_file_that_became_shorter_is_an_error(prompts: Prompts, tmp_path: Path) -> None:
    path = prompts.files[0]
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(ValueError, match=r"plain\.jsonl changed while it was read: rerun the same command"):
        write_ordered(prompts, np.arange(10), tmp_path / "written")
