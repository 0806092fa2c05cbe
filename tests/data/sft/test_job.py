"""`nemo-ext sft_data` from files to packs: trained and skipped samples, second runs, another order, errors."""

import gzip
import json
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.chat.template import FOLDER
from nemo_ext.data.packs.packed_files import read_packed_manifest
from nemo_ext.data.sft.job import run
from nemo_ext.job.config import compose
from nemo_ext.job.files import only_run_in

WORDS = ("the", "a", "model", "block", "layer", "learns", "token", "answer", "data", "train", "step", "loss", "rate")


def record(number: int, *, thinks: bool = True, task: str = "chat") -> dict[str, Any]:
    words = np.random.default_rng(number).choice(WORDS, 60)
    trace = f"<think>{' '.join(words[30:])}</think>" if thinks else ""
    return {
        "id": f"s{number}",
        "task": task,
        "language": "en",
        "messages": [
            {"role": "user", "content": f"question {number}: {' '.join(words[:10])}"},
            {"role": "assistant", "content": f"{trace}answer {number}: {' '.join(words[10:30])}"},
        ],
    }


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A config over two files: 60 samples with reasoning, 20 without, and some invalid records."""
    lines = [json.dumps(record(n)) for n in range(60)]
    lines += ["{not json", json.dumps({"id": "x", "messages": [{"role": "usr", "content": "hi"}]})]
    lines += [json.dumps(record(3)), json.dumps(record(4) | {"id": "twin"})]
    lines.append(json.dumps(record(99) | {"messages": [{"role": "user", "content": "and?"}]}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record(n, thinks=False, task="code")) + "\n" for n in range(100, 120))

    def make(**changes: Any) -> dict[str, Any]:
        config = compose("sft_data")
        sources = [
            {"name": name, "path": str(tmp_path / file)} for name, file in (("a", "a.jsonl"), ("b", "b.jsonl.gz"))
        ]
        given = {"output": str(tmp_path / "out"), "template": "domyn", "sources": sources, "workers": 1}
        given |= {"packing": {"capacity": 2048}, "validation_share": 0.1, "max_bad_share": 0.05}
        return {**config, **given, **changes}

    return make


def texts(prefix: Path) -> Counter[str]:
    """Every packed text with the trained part in brackets."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens, masks = IndexedDataset(str(prefix)), IndexedDataset(f"{prefix}_loss")
    found: Counter[str] = Counter()
    for row, mask in zip(tokens, masks, strict=True):
        marked = "".join(
            f"{'[' if on and not before else ''}{']' if before and not on else ''}{chr(int(token))}"
            for token, on, before in zip(row, mask, np.concatenate([[0], mask[:-1]]), strict=True)
        )
        found[marked + ("]" if mask[-1] else "")] += 1
    return found


def skipped(report: Path) -> dict[str, int]:
    section = report.read_text().split("## Skipped")[1].split("##")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return {cells[1].strip(): int(cells[2]) for cells in rows if cells[2].strip().isdigit()}


@pytest.mark.usefixtures("pictures")
def test_every_sample_is_trained_on_or_counted(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    made = run(prepared())

    counted = skipped(made)
    assert counted == {
        "malformed": 1,
        "schema": 1,
        "duplicate id": 1,
        "near duplicate": 1,
        "structural/no-assistant": 1,
    }
    found = texts(tmp_path / "out" / "train") + texts(tmp_path / "out" / "valid")
    assert found.total() == 80 and max(found.values()) == 1
    for text in found:
        trained = text[text.index("[") : text.index("]")]
        assert "answer" in trained and "question" not in trained
    assert 1 <= texts(tmp_path / "out" / "valid").total() <= 20
    written = made.read_text()
    assert "| a | 65 |" in written and "| b | 20 |" in written
    assert "a.jsonl:61" in written and "did you mean 'user'" in written
    assert f"| near duplicate | 1 | {tmp_path}/a.jsonl:64 repeats {tmp_path}/a.jsonl:5 |" in written
    assert f"| duplicate id | 1 | {tmp_path}/a.jsonl:63 repeats {tmp_path}/a.jsonl:4 |" in written
    assert (tmp_path / "out" / "report.png").stat().st_size > 2_000
    assert "samples stripped" in written


def test_a_second_run_does_nothing_and_other_packing_reuses_the_shards(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run(prepared())
    packs, shard = tmp_path / "out" / "train.bin", tmp_path / "out" / ".work" / "000000.tokens"
    before = packs.stat().st_mtime_ns, shard.stat().st_mtime_ns
    run(prepared())
    assert (packs.stat().st_mtime_ns, shard.stat().st_mtime_ns) == before
    run(prepared(packing={"capacity": 4096}))
    assert shard.stat().st_mtime_ns == before[1] and read_packed_manifest(packs.with_suffix("")).capacity == 4096
    run(prepared(turns="whole"))
    assert shard.stat().st_mtime_ns != before[1]


def same_as_fresh(config: dict[str, Any], folder: Path) -> bool:
    """True if a run into `out`, with shards of an earlier run, gives the same packs as a run into an empty folder."""
    run(config)
    run({**config, "output": str(folder / "anew")})
    made = [(folder / name / "train.bin").read_bytes() for name in ("out", "anew")]
    shutil.rmtree(folder / "anew")
    return made[0] == made[1]


def test_every_relevant_change_makes_the_shards_again(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path, tokenizer_of: Callable[[str], Any], monkeypatch: Any
) -> None:
    template, listed, tests = tmp_path / "my.jinja", tmp_path / "list.txt", tmp_path / "test.txt"
    tokenizer, shard = tmp_path / "tokenizer.json", tmp_path / "out" / ".work" / "000000.tokens"
    shutil.copy(FOLDER / "domyn.jinja", template)
    shutil.copy(tokenizer_of("byte_level").path, tokenizer)
    listed.write_text("our values")
    tests.write_text("a sentence that is in none of the data at all, so that nothing goes")
    filters = {"narrative": {"files": str(listed), "patterns": []}, "repetition": None}
    filters["decontamination"] = {"test_sets": [{"name": "t", "path": str(tests)}], "ngram": 5}
    config = prepared(template=str(template), tokenizer=str(tokenizer), filters=filters, reasoning=None)
    config |= {"sources": config["sources"][:1], "near_duplicates": None}
    run(config)

    def edit(path: Path, before: str, after: str) -> None:
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def samples() -> int:
        return sum(read_packed_manifest(tmp_path / "out" / name).samples for name in ("train", "valid"))

    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: edit(template, "thinking off", "reasoning off"), 0),
        (lambda: edit(listed, "our values", "answer 7"), 1),
        (lambda: tests.write_text(record(5)["messages"][0]["content"]), 1),
        (lambda: shutil.copy(tokenizer_of("split").path, tokenizer), 0),
        (lambda: edit(tmp_path / "a.jsonl", "question 8:", "quastion 8:"), 0),  # no byte longer
        (lambda: monkeypatch.setattr("nemo_ext.data.sft.job.__version__", "later"), 0),
    ]
    for change, fewer in changes:
        before, count = shard.stat().st_mtime_ns, samples()
        change()
        assert same_as_fresh(config, tmp_path)
        assert shard.stat().st_mtime_ns != before and samples() == count - fewer
        before = shard.stat().st_mtime_ns
        run(config)
        assert shard.stat().st_mtime_ns == before


def test_the_reason_for_starting_over_is_reported(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(prepared())
    run(prepared(turns="whole"))
    assert "made from other settings or files (turns), so its shards are removed" in capsys.readouterr().err
    (tmp_path / "out" / ".work" / "made_of.json").write_text('"0123abcd"')
    run(prepared(turns="whole"))
    assert "made by another version of nemo_ext, so its shards are removed" in capsys.readouterr().err


def test_files_of_others_are_not_removed(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    mine = tmp_path / "out" / ".work" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"\.work holds files that this job did not write: move them"):
        run(prepared())
    assert mine.read_text() == "mine"

    mine.unlink()
    (tmp_path / "out" / "valid.jsonl").write_text("mine")
    (tmp_path / "out" / "valid.json").write_text("{}")
    run(prepared(validation_share=0.0))
    shutil.copy(tmp_path / "b.jsonl.gz", mine.parent / "b.jsonl.gz")
    inside = {"name": "b", "path": str(mine.parent / "b.jsonl.gz")}
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz is inside .*\.work, which the job empties"):
        run(prepared(sources=[inside]))
    assert (mine.parent / "b.jsonl.gz").exists()
    assert (tmp_path / "out" / "valid.jsonl").exists() and (tmp_path / "out" / "valid.json").exists()


def test_validation_packs_of_an_earlier_run_are_removed(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run(prepared())
    assert len(list((tmp_path / "out").glob("valid*"))) == 5

    run(prepared(validation_share=0.0))

    assert not list((tmp_path / "out").glob("valid*"))


def test_a_second_job_in_the_same_folder_is_refused(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with only_run_in(tmp_path / "out", "output"), pytest.raises(ValueError, match="another run is using this"):
        run(prepared())


def test_an_interrupted_run_gives_the_same_result(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_ext.data.sft import job

    run(prepared(output=str(tmp_path / "whole")))
    make, made = job.make_shard, []

    def dies(work: Any, piece: Any) -> int:
        if made:
            raise KeyboardInterrupt
        made.append(piece)
        return make(work, piece)

    monkeypatch.setattr(job, "make_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        run(prepared())
    monkeypatch.setattr(job, "make_shard", make)
    run(prepared())
    for name in ("train.bin", "train_loss.bin", "train.idx", "valid.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_decisions_depend_on_ids_and_not_on_order(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = prepared(near_duplicates=None)
    run(config)
    first = {name: texts(tmp_path / "out" / name) for name in ("train", "valid")}
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    run(config)
    assert {name: texts(tmp_path / "out" / name) for name in ("train", "valid")} == first


def test_two_workers_give_the_same_result_as_one(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(prepared())
    run(prepared(output=str(tmp_path / "two"), workers=2))
    assert (tmp_path / "out" / "train.bin").read_bytes() == (tmp_path / "two" / "train.bin").read_bytes()


def test_shares_of_thinking_and_a_budget(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = prepared(thinking_shares={"chat": 0.25}, reasoning={"strip": 0.0, "truncate": 0.0}, validation_share=0.0)
    written = run(config).read_text()
    modes = {
        row.split("|")[1].strip(): row.split("|")[2].strip() for row in written.splitlines() if row.startswith("| o")
    }
    # A quarter of the 60 conversations of this task that are left, and none of the other's.
    assert modes == {"on": "15", "off": "65"}
    assert "| chat | 25.0% | 25.0% | 15 | 45 |" in written and "| chat: stripped for its share | 45 |" in written

    once = read_packed_manifest(tmp_path / "out" / "train")
    run({**config, "sampling": {"tokens": 3 * once.tokens, "alpha": 0.0, "max_epochs": 8}})
    many = read_packed_manifest(tmp_path / "out" / "train")
    assert many.tokens == pytest.approx(3 * once.tokens, rel=0.02)
    found = texts(tmp_path / "out" / "train")
    code = [times for text, times in found.items() if any(f"answer {n}:" in text for n in range(100, 120))]
    chat = [times for text, times in found.items() if any(f"answer {n}:" in text for n in range(60))]
    assert min(code) > max(chat)  # the small source comes more often


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": None}, "template=null: set it to a chat template"),
        ({"template": "nemotron"}, "nemotron"),
        ({"sources": []}, "sources is empty"),
        ({"filters": {"structure": {}}}, "unknown filter 'structure'; did you mean 'structural'"),
        ({"turns": "all"}, "turns='all': input should be 'split', 'last' or 'whole'"),
        ({"packing": {"capacty": 4}}, r"unknown key 'packing\.capacty': did you mean 'capacity'"),
        ({"duplicate_ids": "error"}, r"1 samples repeat the id of an earlier sample"),
        ({"sampling": {"tokens": 1e12}}, "at most"),
        ({"validation_share": 1.0}, "validation_share"),
        ({"thinking_shares": {"math": 15}}, r"thinking_shares\.math=15"),
        ({"near_duplicates": {"rows": 200}}, r"near_duplicates\.rows=200 must be at most near_duplicates\.slots"),
    ],
)
def test_invalid_settings_are_refused(
    prepared: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(prepared(**changes))


def test_a_full_disk_is_reported_with_the_remedy(prepared: Callable[..., dict[str, Any]]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(
            ValueError, match=r"output=.*/out cannot be written .*: correct the cause; the same command resumes"
        ):
            run(prepared())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run(prepared())


def test_an_empty_file_is_reported(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no sample is left.* 1 empty file \(/.*/empty\.jsonl"):
        run(prepared(sources=[{"name": "e", "path": str(tmp_path / "empty.jsonl")}]))


def test_the_command_reports_its_output(
    prepared: Callable[..., dict[str, Any]], tmp_path: Path, command: Callable[..., Any]
) -> None:
    prepared()
    words = [f"output={tmp_path / 'out'}", "template=domyn", "packing.capacity=2048", "workers=1", "max_bad_share=0.05"]
    words += [f"sources=[{{name: a, path: {tmp_path / 'a.jsonl'}}}]"]

    done = command("sft_data", *words, cwd=tmp_path)
    wrong = command("sft_data", *words, "turns=al", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "train: " in done.stderr and "report: " in done.stderr
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and len(wrong.stderr.splitlines()) == 1
