import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nemo_ext
from nemo_ext.data.preference import build, job, spread
from nemo_ext.data.preference.settings import settings
from nemo_ext.job.config import compose
from tests.json_lines import write_jsonl

ROOT = Path(nemo_ext.__file__).parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "hydra_conf/preference_data").glob("*.yaml"))
SCRIPT = """
import sys
sys.modules["torch"] = None
from nemo_ext.cli import main
main(["preference_data", *sys.argv[1:]])
"""
Lines = Callable[[Path], list[dict[str, Any]]]
Command = Callable[..., Any]


def preference_data(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the job in a process where torch cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-c", SCRIPT, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """strong.jsonl with 60 prompts, weak.jsonl with 59 of them in another order, and tools.jsonl with 4 tasks."""
    draw = random.Random(3)
    strong = [
        {"id": f"p{n}", "prompt": f"Question {n}?", "response": "s" * draw.randint(1, 300), "model": "big"}
        | {"task": ("math", "chat")[n % 2]}
        for n in range(60)
    ]
    weak = [{"id": f"p{n}", "text": "w" * draw.randint(1, 300)} for n in range(1, 60)]
    draw.shuffle(weak)
    write_jsonl(tmp_path / "strong.jsonl", strong)
    write_jsonl(tmp_path / "weak.jsonl", weak)
    generations = [{"text": f"{n}", "correct": n % 2 == 0} for n in range(8)]
    calls = [{"text": f"<tool_call>{n}", "correct": False} for n in range(2)]
    python = {"type": "function", "function": {"name": "python", "parameters": {}}}
    tasks = [{"id": n, "prompt": f"Solve {n}", "generations": generations + calls} for n in range(4)]
    write_jsonl(tmp_path / "tools.jsonl", tasks + [task | {"tools": [python]} for task in tasks])
    return tmp_path


def config(data: Path, **changes: Any) -> dict[str, Any]:
    sources = {
        "qwen": {"kind": "delta", "strong": str(data / "strong.jsonl"), "weak": str(data / "weak.jsonl")},
        "tools": {"kind": "tool_hallucination", "path": str(data / "tools.jsonl"), "task": "math"},
    }
    return {"output": str(data / "out"), "sources": sources, "tokenizer": {"kind": "byte"}, "workers": 1} | changes


@pytest.mark.parametrize("wrong", [{"seed": True}, {"limit": "7"}, {"swap": "on"}, {"max_bad_share": True}])
def test_settings_are_not_coerced(data: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        settings(config(data, **wrong))


def test_differences_in_length_are_chosen_minus_rejected(
    data: Path, lines_of: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plotted: list[Any] = []
    monkeypatch.setattr("nemo_ext.data.preference.report._plot", lambda _, counts, unit: plotted.append(counts))
    job.run(config(data, filters={"max_length_difference": 100}))

    pairs = [pair for pair in lines_of(data / "out/trl_train.jsonl") if pair["source"] == "qwen"]
    lengths = [[len(pair[side][-1]["content"]) for side in ("chosen", "rejected")] for pair in pairs]
    assert plotted[0]["qwen"].after == Counter(chosen - rejected for chosen, rejected in lengths)


@pytest.mark.usefixtures("pictures")
def test_pairs_of_two_files_and_three_groups(data: Path, lines_of: Lines) -> None:
    job.run(config(data, filters={"max_length_difference": 100}, validation_share=0.2))

    trl = {split: lines_of(data / f"out/trl_{split}.jsonl") for split in ("train", "validation")}
    nemo_rl = {split: lines_of(data / f"out/nemo_rl_{split}.jsonl") for split in ("train", "validation")}
    delta = [pair for split in trl.values() for pair in split if pair["source"] == "qwen"]
    assert 10 < len(delta) < 59
    for pair in delta:
        chosen, rejected = (pair[side][-1]["content"] for side in ("chosen", "rejected"))
        assert set(chosen) == {"s"} and set(rejected) == {"w"} and abs(len(chosen) - len(rejected)) < 100
    for split, pairs in trl.items():
        assert [pair["id"] for pair in pairs] == [pair["id"] for pair in nemo_rl[split]]
        assert all(pair["completions"][0]["completion"] for pair in nemo_rl[split])
    prompts = [{pair["prompt"][-1]["content"] for pair in pairs} for pairs in trl.values()]
    assert not prompts[0] & prompts[1], "a prompt is in one split only"
    counted = json.loads((data / "out/report.json").read_text())
    assert counted["left_out"]["qwen"]["groups"] == {"no weak answer": 1}
    assert counted["left_out"]["qwen"]["pairs"] == {"length difference": 59 - len(delta)}
    kinds = [pair["kind"] for pairs in trl.values() for pair in pairs]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "delta": len(delta),
        "no_tools": 36,
        "with_tools": 36,
        "hallucination_penalty": 32,
    }
    page = (data / "out/report.md").read_text()
    assert "| qwen | no weak answer | 1 | p0 |" in page and "![chosen minus rejected length](lengths.png)" in page
    assert (data / "out/lengths.png").stat().st_size > 1000
    assert not (data / "out/.work").exists()


def test_the_order_and_number_of_files_do_not_matter(data: Path, monkeypatch: Any) -> None:
    job.run(config(data))
    for name in ("strong", "weak", "tools"):
        records = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        random.Random(9).shuffle(records)
        write_jsonl(data / f"other/{name}.jsonl", records[:7])
        with gzip.open(data / f"other/{name}_2.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records[7:])
    other = config(data, output=str(data / "again"))
    other["sources"]["qwen"] |= {side: str(data / f"other/{side}*") for side in ("strong", "weak")}
    other["sources"]["tools"]["path"] = str(data / "other/tools*")
    monkeypatch.setattr("nemo_ext.data.preference.spread.PART_BYTES", 500)  # many parts

    job.run(other)

    for name in ("trl_train.jsonl", "nemo_rl_train.jsonl", "trl_validation.jsonl"):
        assert (data / "out" / name).exists() == (data / "again" / name).exists()
        if (data / "out" / name).exists():
            first, second = ((data / where / name).read_text().splitlines() for where in ("out", "again"))
            assert first == second


def test_a_tokenizer_changed_in_place_is_used_again(data: Path, bpe_file: Path, monkeypatch: Any) -> None:
    (data / "tokenizer.json").write_text(bpe_file.read_text())
    given = config(data, tokenizer={"kind": "huggingface", "path": str(data / "tokenizer.json")})
    given["sources"].pop("tools")
    monkeypatch.setattr(job.shutil, "rmtree", lambda *_, **__: None)
    job.run(given)
    before = (data / "out/report.md").read_text()

    described = json.loads(bpe_file.read_text())
    described["model"]["merges"] = []
    (data / "tokenizer.json").write_text(json.dumps(described))
    job.run(given)

    assert (data / "out/report.md").read_text() != before


def test_an_interrupted_run_is_resumed(data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nemo_ext.data.preference.spread.PART_BYTES", 2000)
    job.run(config(data, output=str(data / "whole")))
    built = []

    def stop_at_the_third(work: Any, part: tuple[Path, Path]) -> None:
        if len(built) == 2:
            raise KeyboardInterrupt
        built.append(part[1])
        build.build(work, part)

    monkeypatch.setattr(job, "build", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        job.run(config(data))
    done = {path: path.stat().st_mtime_ns for path in built}
    monkeypatch.setattr(job, "build", build.build)
    kept = dict[Path, int]()
    monkeypatch.setattr(job.shutil, "rmtree", lambda *_, **__: kept.update({p: p.stat().st_mtime_ns for p in done}))

    job.run(config(data))

    assert kept == done, "finished parts were not built again"
    for name in ("trl_train.jsonl", "report.json"):
        assert (data / "out" / name).read_bytes() == (data / "whole" / name).read_bytes()


def test_limits_keep_a_subset_and_count_the_rest(data: Path, lines_of: Lines) -> None:
    limited = config(data, limit=30, validation_share=0.0)
    limited["sources"]["qwen"]["limit"] = 10

    job.run(limited)

    pairs = lines_of(data / "out/trl_train.jsonl")
    left = json.loads((data / "out/report.json").read_text())["left_out"]
    assert len(pairs) == 30
    assert left["qwen"]["pairs"]["beyond the source's limit"] == 49
    assert sum(one["pairs"]["beyond the overall limit"] for one in left.values()) == 10 + 104 - 30


def test_a_prompt_with_tools_is_separate_for_the_limit(tmp_path: Path, lines_of: Lines) -> None:
    tool = {"type": "function", "function": {"name": "python", "parameters": {}}}
    generations = [{"text": "4", "model": "big"}, {"text": "5", "model": "small"}]
    records = [{"id": n, "prompt": f"Solve {n}", "generations": generations} for n in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", records + [record | {"tools": [tool]} for record in records])
    source = {"kind": "delta", "path": str(path), "strong_models": "big", "weak_models": "small", "limit": 10}

    job.run({"output": str(tmp_path / "out"), "sources": {"a": source}, "workers": 1})

    pairs = lines_of(tmp_path / "out/trl_train.jsonl")
    assert len(pairs) == len({pair["id"] for pair in pairs}) == 10


def test_an_answer_without_a_prompt_is_skipped_if_its_id_has_several(tmp_path: Path, lines_of: Lines) -> None:
    tool = {"type": "function", "function": {"name": "python", "parameters": {}}}
    big = {"id": 1, "prompt": "Solve", "response": "4", "model": "big"}
    small = {"id": 1, "response": "5", "model": "small"}
    path = write_jsonl(
        tmp_path / "a.jsonl", [big, big | {"tools": [tool]}, small, *({**big, "id": 2}, {**small, "id": 2})]
    )
    source = {"kind": "delta", "path": str(path), "strong_models": "big", "weak_models": "small"}

    job.run({"output": str(tmp_path / "out"), "sources": {"a": source}, "workers": 1})

    assert [pair["id"] for pair in lines_of(tmp_path / "out/trl_train.jsonl")] == ["2/delta"]
    left = json.loads((tmp_path / "out/report.json").read_text())["left_out"]["a"]
    assert left["records"] == {"answer without a prompt, whose id has prompts with different tools": 1}
    assert left["groups"] == {"no weak answer": 2}


def test_large_parts_are_divided_with_few_open_files(data: Path, monkeypatch: Any) -> None:
    job.run(config(data))
    monkeypatch.setattr("nemo_ext.data.preference.spread.PART_BYTES", 400)
    monkeypatch.setattr("nemo_ext.data.preference.spread.MOST_PARTS", 4)
    monkeypatch.setattr("nemo_ext.data.preference.write.MOST_OPEN", 2)
    divided: list[Path] = []
    divide = spread._divided
    monkeypatch.setattr(spread, "_divided", lambda path: divided.append(path) or divide(path))
    job.run(config(data, output=str(data / "small")))

    assert any(path.name.count(".") == 1 for path in divided), "some parts were divided twice"
    for name in ("trl_train.jsonl", "nemo_rl_train.jsonl"):
        assert (data / "small" / name).read_bytes() == (data / "out" / name).read_bytes()


def test_files_of_an_earlier_run_are_removed_and_inputs_kept(data: Path) -> None:
    job.run(config(data, validation_share=0.5))
    assert (data / "out/trl_validation.jsonl").exists()
    job.run(config(data, validation_share=0.0))
    assert not (data / "out/trl_validation.jsonl").exists()

    (data / "out/.work").mkdir()
    (data / "strong.jsonl").rename(data / "out/.work/strong.jsonl")
    inside = config(data)
    inside["sources"]["qwen"]["strong"] = str(data / "out/.work/strong.jsonl")
    with pytest.raises(ValueError, match=r"strong\.jsonl is inside .*\.work, which the job empties"):
        job.run(inside)
    assert (data / "out/.work/strong.jsonl").exists()


def test_invalid_records_are_reported_and_too_many_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(100)]
    records += [{"prompt": f"q{n}", "chosen": "a"} for n in range(100, 102)]
    given = {"output": str(tmp_path / "out"), "workers": 1}
    given["sources"] = {"a": {"kind": "pairs", "path": str(write_jsonl(tmp_path / "a.jsonl", records))}}

    with pytest.raises(
        ValueError, match=r"sources\.a: 2 of 102 records are malformed, more than max_bad_share=0\.01 \(.*rej"
    ):
        job.run(given)
    job.run(given | {"max_bad_share": 0.1})

    assert "102 records, 100 prompts, 100 kept; skipped: 2 schema" in capsys.readouterr().err


def test_invalid_records_are_counted_with_their_place(data: Path) -> None:
    with open(data / "tools.jsonl", "a") as file:
        file.write('not json\n{"id": 9}\n{"id": 10, "prompt": "x", "generations": [{"text": 5}]}\n[1]\n{"task": "m"}\n')
    with pytest.raises(ValueError, match=r"sources.tools: 3 of 13 records .* max_bad_share=0.01"):
        job.run(config(data))

    job.run(config(data, max_bad_share=0.5))

    left = json.loads((data / "out/report.json").read_text())["left_out"]["tools"]["records"]
    assert left == {"malformed": 2, "schema": 3}
    page = (data / "out/report.md").read_text()
    assert "tools.jsonl:9: not JSON" in page
    assert "tools.jsonl:11: generations[0].text: messages: expected a list" in page


def test_a_template_renders_and_measures_the_pairs(data: Path, lines_of: Lines) -> None:
    job.run(config(data, template="nemotron3_nano", validation_share=0.0))

    pairs = lines_of(data / "out/trl_train.jsonl")
    tooled = next(pair for pair in pairs if pair["kind"] == "with_tools")
    assert "<name>python</name>" in tooled["prompt"]
    assert all(pair["prompt"].endswith("<think></think>") for pair in pairs)
    assert all(pair["chosen"].endswith("<|im_end|>") for pair in pairs)


def test_safety_pairs_are_also_samples_of_a_reward_model(tmp_path: Path, lines_of: Lines) -> None:
    generations = [{"text": label, "label": label} for label in ("safe", "unsafe", "refusal")]
    records = [
        {"prompt": f"{label} {n}", "prompt_label": label, "generations": generations}
        for label in ("safe", "harmful")
        for n in range(5)
    ]
    path = write_jsonl(tmp_path / "safety.jsonl", records)

    source = {"kind": "safety", "path": str(path), "as_genrm": {"ranking": 2}}
    job.run({"output": str(tmp_path / "out"), "sources": {"safety": source}, "workers": 1})

    samples = lines_of(tmp_path / "out/genrm_train.jsonl")
    assert sorted((sample["score_1"], sample["ranking"]) for sample in samples) == [(1, 5)] * 10 + [(5, 2)] * 10
    assert len(lines_of(tmp_path / "out/trl_train.jsonl")) == 10

    job.run({"output": str(tmp_path / "once"), "sources": {"safety": source}, "workers": 1, "swap": False})

    samples = lines_of(tmp_path / "once/genrm_train.jsonl")
    assert len(samples) == 10
    assert {(sample["score_1"], sample["ranking"], sample["swapped"]) for sample in samples} == {
        (1, 5, True),
        (5, 2, False),
    }, "the better answer is not always the first"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes(preset: str) -> None:
    with pytest.raises(ValueError, match="not set: output, sources"):
        compose("preference_data", [f"preset={preset}"])
    files = {
        "domyn": {
            "heuristic": ("strong", "weak"),
            "judged": ("path",),
            "multi_turn_context": ("strong", "weak"),
            "multi_turn_self_talk": ("strong", "weak"),
        },
        "olmo3_think": {"qwen3": ("strong", "weak")},
        "nano_tool_hallucination": {"math": ("path",), "stem": ("path",)},
        "nano_genrm": {"helpsteer3": ("path",), "arena": ("path",), "safety": ("path",)},
    }[preset]
    words = [f"sources.{source}.{key}=x.jsonl" for source, keys in files.items() for key in keys]
    words += [f"preset={preset}", "output=o", "tokenizer={kind: byte}"]

    given = settings(compose("preference_data", words))

    assert given.preset == preset
    limits = {"domyn": 260_000, "olmo3_think": 150_000, "nano_tool_hallucination": 50_000, "nano_genrm": None}
    assert given.limit == limits[preset]
    if preset == "domyn":
        assert sum(source.limit or 0 for source in given.sources) == 260_000
        assert {source.filters.length_difference_tasks for source in given.sources} == {("chat", "multi_turn")}
        assert {source.filters.max_prompt_tokens for source in given.sources} == {640}


def test_help_explains_every_key(tmp_path: Path, command: Command) -> None:
    helped = command("preference_data", "--help", cwd=tmp_path)

    assert (helped.returncode, helped.stderr) == (0, "")
    for key in compose("preference_data", ["output=o"]):
        assert f"\n  {key} " in helped.stdout, f"{key} is not explained"


def test_the_command_without_torch(data: Path) -> None:
    made = preference_data(
        "preset=olmo3_think",
        "output=pairs",
        "sources.qwen3.strong=strong.jsonl",
        "sources.qwen3.weak=weak.jsonl",
        "sources.mine={kind: tool_hallucination, path: tools.jsonl}",
        "tokenizer={kind: byte}",
        cwd=data,
    )

    assert made.returncode == 0, made.stderr
    assert (data / "pairs/report.md").read_text().startswith("# Preference data: olmo3_think\n")
    assert "warning: NeMo-RL passes neither tools" in made.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sources={a: {kind: delta, strong: strong.jsonl}}",), "sources.a: kind=delta has only one of strong"),
        (("sources={a: {kind: detla, path: x}}",), "sources.a.kind='detla'"),
        (("sources={a: {kind: judged, pth: x}}",), "sources.a: unknown key 'pth': did you mean 'path'?"),
        (("sources={a: {kind: judged, path: no.jsonl}}",), "no.jsonl"),
        (
            ("sources={a: {kind: judged, path: x, keys: {promt: y}}}",),
            "'keys.promt': did you mean 'prompt'?",
        ),
        (("sources={a: {kind: judged, path: x, filters: {max_token: 5}}}",), "did you mean 'max_tokens'?"),
        (("sources={a: {kind: judged, path: x}}", "filters.max_tokens=9"), "sources.a: filters count tokens, but"),
        (("sources={a: {kind: judged, path: x}}", "outputs=[tlr]"), "unknown format 'tlr'; did you mean 'trl'?"),
        (("preset=olmo3_think",), "not set: sources.qwen3.strong, sources.qwen3.weak"),
        ((), "sources is empty"),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], message: str, data: Path, command: Command) -> None:
    ended = command("preference_data", *words, "output=out", cwd=data)

    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert message in line
    assert not (data / "out").exists()


def test_parquet_gives_the_same_pairs(data: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    other = config(data, output=str(data / "again"))
    for source, keys in (("qwen", ("strong", "weak")), ("tools", ("path",))):
        for key in keys:
            path = Path(other["sources"][source][key])
            records = [json.loads(line) for line in path.read_text().splitlines()]
            for record in records if source == "tools" else ():  # as data sets in Parquet have them
                record["tools"] = json.dumps(record["tools"]) if "tools" in record else None
            table = pyarrow.Table.from_pylist(records)
            pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=3)
            other["sources"][source][key] = str(path.with_suffix(".parquet"))

    job.run(config(data))
    job.run(other)

    assert (data / "out/trl_train.jsonl").read_bytes() == (data / "again/trl_train.jsonl").read_bytes()


def test_truncated_files_are_errors(data: Path) -> None:
    whole = gzip.compress((data / "strong.jsonl").read_bytes())
    (data / "cut.jsonl.gz").write_bytes(whole[:-40])
    (data / "bytes.jsonl").write_bytes((data / "weak.jsonl").read_bytes() + b'{"id": "p1", "text": "\xff"}\n')
    (data / "empty.jsonl").touch()
    broken = config(data)
    broken["sources"]["qwen"]["strong"] = str(data / "cut.jsonl.gz")
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz"):
        job.run(broken)

    broken["sources"]["qwen"] |= {"strong": str(data / "strong.jsonl"), "weak": str(data / "bytes.jsonl")}
    job.run(broken | {"max_bad_share": 0.5})
    left = json.loads((data / "out/report.json").read_text())["left_out"]["qwen"]["records"]
    assert left == {"malformed": 1}

    broken["sources"]["tools"]["path"] = str(data / "empty.jsonl")
    with pytest.raises(ValueError, match=r"sources\.tools: the files have no records"):
        job.run(broken | {"max_bad_share": 0.5})
