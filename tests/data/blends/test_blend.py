import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.blends.blend import flattened, tokens_of_run
from nemo_ext.data.blends.plan import plan_blend
from nemo_ext.data.blends.report import write_blend
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.data.training import tokenize_streams, with_data

Section = Callable[..., dict[str, Any]]


@pytest.fixture
def section(tmp_path: Path) -> Section:
    """A `data` section with this blend; `sizes` are numbers of tokens of files to make, by stream."""

    def make(blend: dict[str, Any], **tokens: int) -> dict[str, Any]:
        for name, count in tokens.items():
            for split, length in (("train", count), ("valid", 3)):
                index = tmp_path / f"{name}_{split}.idx"
                write_index(index, np.array([length], dtype=np.int64), np.uint16)
                index.with_suffix(".bin").write_bytes(bytes(2 * length))
        return {"directory": str(tmp_path), "tokenizer": {"kind": "byte"}, "blend": blend}

    return make


def config(data: dict[str, Any], *, tokens: int) -> dict[str, Any]:
    return {"data": data, "train": {"tokens": tokens}, "megatron": {}}


LANGUAGES = {"share": 20, "names": "web_*", "of": ["spa", "ita"]}


def test_the_audit_has_tokens_and_epochs_of_groups_and_streams(section: Section) -> None:
    plan = plan_blend(section({"code": 80, "web": LANGUAGES}, code=400, web_spa=10, web_ita=30), tokens=1000)
    parts = {part.node.key: part for part in plan.parts}

    assert [(part.depth, part.node.key) for part in plan.parts] == [
        (0, ""),
        (1, "code"),
        (1, "web"),
        (2, "spa"),
        (2, "ita"),
    ]
    assert (parts["code"].tokens, parts["code"].epochs) == (800, 2)
    assert (parts["web"].size, parts["web"].tokens, parts["web"].epochs) == (40, 200, 5)
    assert (parts["spa"].epochs, parts["ita"].epochs) == (10, pytest.approx(10 / 3))
    assert plan.part("web", "ita") is parts["ita"]
    assert parts[""].share == 1


def test_streams_read_too_often_cause_a_warning_or_an_error(section: Section) -> None:
    data = section({"code": 80, "web": LANGUAGES}, code=400, web_spa=10, web_ita=30)

    assert plan_blend(data, tokens=100).warning() is None
    assert str(plan_blend(data, tokens=1000).warning()).startswith(
        "some streams are read more than max_epochs=4 times: web_spa 10 times; add text"
    )
    assert plan_blend({**data, "max_epochs": 10}, tokens=1000).warning() is None
    plan_blend({**data, "refuse_epochs": 10}, tokens=1000)
    with pytest.raises(
        ValueError, match=r"data\.blend\.web\.of\.spa: web_spa would be read 10 times .*refuse_epochs=9"
    ):
        plan_blend({**data, "refuse_epochs": 9}, tokens=1000)


def test_a_cap_is_marked_and_its_excess_goes_elsewhere(section: Section) -> None:
    plan = plan_blend(section({"code": 80, "wiki": {"share": 20, "cap_epochs": 2}}, code=400, wiki=50), tokens=1000)

    assert [(part.node.key, float(part.share), part.capped) for part in plan.parts[1:]] == [
        ("code", 0.9, False),
        ("wiki", 0.1, True),
    ]


def test_notes_on_normalised_shares_tiers_and_unknown_sizes(section: Section) -> None:
    blend = {
        "code": {"share": 3, "tokens": 1000},
        "passes": {"share": 2, "by": "epochs", "of": {"a": 1, "b": 2}},
        "tiers": {"share": 1, "by": "tiers", "of": {"A": {"each": 0.1, "of": ["x"]}, "B": ["y"]}},
    }
    notes = plan_blend(section(blend, a=100, b=100), tokens=1800).notes()

    assert notes == [
        "data.blend: the shares sum to 6; each is divided by this sum",
        "data.blend.passes: configured epochs are only relative; in this run: a 1 -> 2, b 2 -> 4",
        "data.blend.tiers: a child of tier B gets more than a child of tier A: 0.9 of the group, against 0.1",
        "sizes are assumed, not counted: code",
        "sizes and epochs are unknown without files or `tokens`: x, y",
    ]


def test_tiers_that_give_all_children_the_same_have_no_note(section: Section) -> None:
    tiers = {"share": 1, "by": "tiers", "of": {"A": {"share": 0.5, "of": ["x"]}, "B": ["y"]}}

    assert not plan_blend(section({"tiers": tiers}, x=100, y=100), tokens=100).notes()


def test_an_empty_stream_is_refused_with_its_place(section: Section) -> None:
    with pytest.raises(ValueError, match=r"data\.blend\.web\.of\.ita: .*web_ita has no training tokens"):
        plan_blend(section({"code": 80, "web": LANGUAGES}, code=400, web_spa=10, web_ita=0), tokens=1000)


@pytest.mark.parametrize("tokens", [0, -1])
def test_the_number_of_tokens_must_be_positive(section: Section, tokens: int) -> None:
    with pytest.raises(ValueError, match="the number of tokens of the run must be positive"):
        plan_blend(section({"code": 1}, code=5), tokens=tokens)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "four"])
def test_limits_must_be_positive(section: Section, limit: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.max_epochs must be a number above 0"):
        plan_blend({**section({"code": 1}, code=5), "max_epochs": limit})


# Training


def test_training_reads_the_streams_by_their_shares(
    section: Section, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(section({"code": 80, "web": LANGUAGES}, code=400, web_spa=10, web_ita=30), tokens=1000)

    made = with_data(run)

    path = {name: str(tmp_path / name) for name in ("code", "web_spa", "web_ita")}
    assert made["megatron"]["train_data_path"] == [
        "0.8",
        f"{path['code']}_train",
        "0.1",
        f"{path['web_spa']}_train",
        "0.1",
        f"{path['web_ita']}_train",
    ]
    assert made["megatron"]["valid_data_path"][1::2] == [f"{path[name]}_valid" for name in path]
    assert [(stream["name"], stream["weight"]) for stream in made["data"]["streams"]] == [
        ("code", 0.8),
        ("web_spa", 0.1),
        ("web_ita", 0.1),
    ]
    assert "blend" not in made["data"] and "blend" in run["data"] and "train_data_path" not in run["megatron"]
    assert (
        capsys.readouterr().err.count("data: some streams are read more than max_epochs=4 times: web_spa 10 times") == 1
    )


def test_planning_a_flat_blend_again_gives_the_same_shares(section: Section) -> None:
    made = with_data(config(section({"code": 2, "web": LANGUAGES}, code=400, web_spa=10, web_ita=30), tokens=10))

    again = with_data(config(made["data"], tokens=10))

    assert again["megatron"]["train_data_path"] == made["megatron"]["train_data_path"]
    assert again["data"] == made["data"]


def test_arguments_set_by_the_user_are_kept(section: Section) -> None:
    run = config(section({"code": 1}, code=5), tokens=5) | {"megatron": {"train_data_path": ["mine"]}}

    assert with_data(run)["megatron"]["train_data_path"] == ["mine"]


def test_training_requires_the_files_of_streams_without_source(section: Section) -> None:
    run = config(
        section({"code": 80, "web": {**LANGUAGES, "of": {"spa": {"share": 1, "tokens": 9}}}}, code=5), tokens=5
    )

    with pytest.raises(
        ValueError, match=r"data\.blend\.web\.of\.spa: .*web_spa_train\.idx of stream web_spa does not exist"
    ):
        with_data(run)


def test_files_of_another_tokenizer_are_refused(tmp_path: Path, bpe_file: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "other.txt").write_text("more")
    source = load_source({"kind": "text", "path": str(tmp_path / "*.txt")})
    tokenize_stream(source, HuggingFaceTokenizer(bpe_file), tmp_path / "web", workers=1, progress=False)
    data = {"directory": str(tmp_path), "streams": [{"name": "web", "weight": 1}]}

    with_data(config({**data, "tokenizer": {"kind": "huggingface", "path": str(bpe_file)}}, tokens=5))

    with pytest.raises(ValueError, match=r"data\.streams\[0\]: .*web was tokenised with .*, not with data\.tokenizer"):
        with_data(config({**data, "tokenizer": {"kind": "byte"}}, tokens=5))


def test_training_requires_validation_data(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one document")
    source = {"kind": "text", "path": str(tmp_path / "in.txt")}
    streams = [{"name": "web", "weight": 1, "source": source}]
    data = {"directory": str(tmp_path), "tokenizer": {"kind": "byte"}, "workers": 1, "streams": streams}

    with pytest.raises(ValueError, match=r"data\.validation_share=0 leaves stream web without validation data"):
        with_data(config({**data, "validation_share": 0}, tokens=5))
    with pytest.raises(
        ValueError,
        match=r"web has no validation documents, which training requires \(1 document, .*no validation files",
    ):
        tokenize_streams(data)


def test_tokenising_for_training_reports_whether_sizes_changed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    streams = [{"name": "web", "weight": 1, "source": {"kind": "text", "path": str(tmp_path / "*.txt")}}]
    data = {"directory": str(tmp_path), "tokenizer": {"kind": "byte"}, "workers": 1, "streams": streams}
    data["mixed_lengths"] = {"short": 4, "short_share": 0.5}  # not tokenising's business

    assert tokenize_streams(data) and not tokenize_streams(data)
    assert not tokenize_streams({"packed": {"train": "x"}, "streams": None}) and not tokenize_streams(None)


def test_damaged_files_that_will_be_tokenised_again_do_not_stop_training(section: Section, tmp_path: Path) -> None:
    data = section({"code": {"share": 1, "source": {"kind": "jsonl", "path": "x"}}}, code=5)
    (tmp_path / "code_train.bin").write_bytes(b"cut")

    with_data(config(data, tokens=5))

    with pytest.raises(ValueError, match="has 3 bytes"):
        plan_blend(data)


def test_a_blend_can_be_planned_for_a_part_of_the_run(section: Section, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(section({"code": 1}, code=5), tokens=1000)

    with_data(run, tokens=20)

    assert capsys.readouterr().err == ""


def test_the_runs_length_is_its_steps_or_its_tokens() -> None:
    sizes = {"train_iters": 3, "global_batch_size": 4, "seq_length": 5}

    assert tokens_of_run({"megatron": sizes, "train": {"tokens": 7}}) == 60
    assert tokens_of_run({"megatron": {**sizes, "train_iters": None}, "train": {"tokens": 7e3}}) == 7000
    assert tokens_of_run({"megatron": {}}) is None


def test_phases_with_separate_data_are_not_counted() -> None:
    phases = {"a": {"tokens": 10}, "b": {"tokens": 30.0}, "c": {"tokens": 20, "data": {}}}

    assert tokens_of_run({"phases": phases, "train": {"tokens": 60}}) == 40


def test_a_tree_is_flattened_for_tokenising() -> None:
    source = {"kind": "jsonl", "path": "x"}
    of = {"spa": {"share": 1, "source": source}, "ita": 2}
    data = {"directory": "d", "tokenizer": "byte", "max_epochs": 3, "blend": {"web": {**LANGUAGES, "of": of}}}

    assert flattened(data) == {
        "directory": "d",
        "tokenizer": "byte",
        "streams": [
            {"name": "web_spa", "weight": 1.0, "prefix": "d/web_spa", "source": source},
            {"name": "web_ita", "weight": 1.0, "prefix": "d/web_ita"},
        ],
    }


# Files


@pytest.mark.usefixtures("pictures")
def test_megatron_reads_the_blend_files(section: Section, tmp_path: Path) -> None:
    get_blend_from_list = pytest.importorskip("megatron.core.datasets.utils").get_blend_from_list
    plan = plan_blend(section({"code": 80, "web": LANGUAGES}, code=400, web_spa=10, web_ita=30), tokens=1000)

    report = write_blend(plan, tmp_path / "out", title="Mine")

    names = ("code", "web_spa", "web_ita")
    train = [str(tmp_path / f"{name}_train") for name in names], [0.8, 0.1, 0.1]
    valid = [str(tmp_path / f"{name}_valid") for name in names], [0.8, 0.1, 0.1]
    lists = {name: json.loads((tmp_path / f"out/{name}.json").read_text()) for name in ("blend", "nemo_paths")}
    assert get_blend_from_list((tmp_path / "out/blend.txt").read_text().split()) == train
    assert get_blend_from_list(lists["blend"]["train"]) == train
    assert get_blend_from_list(lists["blend"]["valid"]) == valid
    assert lists["blend"]["test"] is None
    assert lists["nemo_paths"].keys() == {"train", "validation", "test"}
    assert (tmp_path / "out/blend.png").read_bytes().startswith(b"\x89PNG")
    page = report.read_text()
    assert "**Warning:** some streams are read more than max_epochs=4 times: web_spa 10 times" in page
    assert "| &emsp;&emsp;web_spa | 10 % | 100 | 10 | 10 |  |" in page


def test_megatron_samples_by_the_plan() -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    tiers = {
        "share": 12,
        "by": "tiers",
        "of": {"A": {"each": 0.1, "of": list("abcd")}, "B": list("efgh"), "C": list("ij")},
    }
    plan = plan_blend({"directory": "d", "blend": {"code": 50, "web": 38, "languages": tiers}})
    weights, samples = [float(word) for word in plan.megatron_words("train")[::2]], 50_000

    chosen, within = np.zeros(samples, dtype=np.int16), np.zeros(samples, dtype=np.int64)
    helpers.build_blending_indices(chosen, within, weights, len(weights), samples, False)

    assert np.bincount(chosen) == pytest.approx(np.array(weights) * samples, abs=1)


def test_a_report_requires_neither_files_nor_a_length(tmp_path: Path) -> None:
    plan = plan_blend({"directory": "nowhere", "blend": {"code": 80, "web": LANGUAGES}})

    page = write_blend(plan, tmp_path, title="Mine").read_text()

    assert "| &emsp;code | 80 % | ? | ? | ? |  |" in page


def test_a_path_with_white_space_is_refused(tmp_path: Path) -> None:
    plan = plan_blend({"directory": "my data", "blend": {"code": 1}})

    with pytest.raises(ValueError, match=r"data\.blend\.code: the prefix .my data/code. contains whitespace"):
        write_blend(plan, tmp_path, title="Mine")
