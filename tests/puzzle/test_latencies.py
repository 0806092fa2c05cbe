"""Latencies of a user: the template, mistakes in a file, and the resulting costs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.checkpoint.description import from_config
from nemo_ext.job.config import compose
from nemo_ext.puzzle.choice.choose import Costs
from nemo_ext.puzzle.cost import OUTSIDE
from nemo_ext.puzzle.job import check
from nemo_ext.puzzle.latencies import blocks_to_measure, read_table
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.variants import variants

WORDS = (
    *("data=mock", "run_dir=unused", 'model.pattern="(*-)x2"', "puzzle.variants.ffn=[0.5]", "puzzle.variants.kv=[]"),
    *("puzzle.variants.linear=false", "puzzle.serving={batch: 4, prompt: 8, context: 16}"),
)


def wanted() -> tuple[Any, list[Any], Any]:
    config = compose("puzzle", [*WORDS])
    architecture, chosen = from_config(config).architecture, settings(config["puzzle"])
    return architecture, blocks_to_measure(variants(architecture, chosen.variants)), chosen.serving


def filled_in(folder: Path) -> dict[str, Any]:
    """The template, filled in with distinct numbers."""
    with pytest.raises(ValueError, match=r"no such file; fill in .*/mine_to_fill_in.json, which lists the blocks"):
        read_table(folder / "mine.json", *wanted())
    table: dict[str, Any] = json.loads((folder / "mine_to_fill_in.json").read_text())
    for number, row in enumerate(table["latencies"]):
        row.update(prefill_seconds=1.0 + number, decode_seconds=0.1 + number)
    return table


def test_a_filled_in_template_can_be_read(tmp_path: Path) -> None:
    table = filled_in(tmp_path)
    ffn = compose("puzzle", [*WORDS])["megatron"]["ffn_hidden_size"]
    # Values of the parent may be omitted.
    assert len(table["latencies"]) == 4
    table["latencies"][0]["block"] = "*"
    table["latencies"][2]["block"] = f"-{{ffn={ffn // 2}}}"
    (tmp_path / "mine.json").write_text(json.dumps(table))

    found = read_table(tmp_path / "mine.json", *wanted())

    assert [each.prefill_seconds for each in found.values()] == [1.0, 2.0, 3.0, 4.0]
    (tmp_path / "mine.json").rename(tmp_path / "mine_to_fill_in.json")
    with pytest.raises(ValueError, match="no such file"):
        read_table(tmp_path / "mine.json", *wanted())
    assert json.loads((tmp_path / "mine_to_fill_in.json").read_text()) == table, "an existing template is kept"
    assert list(found) == [*map(str, wanted()[1]), OUTSIDE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.update(batch=8),
            "a scenario that differs from puzzle.serving (batch: 8 -> 4); make them agree",
        ),
        (lambda table: table["latencies"].pop(), "has no latencies of outside: add them, or narrow puzzle.variants"),
        (lambda table: table["latencies"].append(table["latencies"][1]), " twice: remove one entry"),
        (lambda table: table["latencies"][0].update(block="attention"), "'attention' is not a valid block ("),
        (lambda table: table["latencies"][0].update(prefill_seconds=-1.0), "prefill_seconds=-1.0: "),
        (lambda table: table["latencies"][0].update(decode_seconds=float("inf")), "decode_seconds=inf: "),
        (lambda table: table["latencies"][0].update(decode_seconds=None), "decode_seconds=None: "),
        (lambda table: table.update(note="x"), "unknown key 'note'"),
    ],
)
def test_mistakes_are_named(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    table = filled_in(tmp_path)
    change(table)
    (tmp_path / "mine.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_table(tmp_path / "mine.json", *wanted())


@pytest.mark.slow
def test_costs_have_the_latencies_and_a_changed_file_is_refused(in_process: Callable[..., str], tmp_path: Path) -> None:
    words = [
        *(*WORDS, f"run_dir={tmp_path / 'run'}", f"puzzle.measure.table={tmp_path / 'mine.json'}", "train.tokens=64"),
        *("megatron.seq_length=16", "megatron.micro_batch_size=1", "megatron.global_batch_size=1"),
        "puzzle.stages=[parent,cost]",
    ]
    with pytest.raises(ValueError, match=r"mine_to_fill_in.json, which lists the blocks to measure"):
        in_process(*words)
    table = filled_in(tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(table))

    in_process(*words)

    costs = Costs.read(tmp_path / "run" / "child" / "costs.csv")
    assert costs.outside["prefill_seconds"] == 4.0
    kept, half = costs.variants[2, "keep"], next(each for (n, name), each in costs.variants.items() if "ffn" in name)
    assert (kept[1]["decode_seconds"], half[1]["decode_seconds"]) == (1.1, 2.1)
    assert costs.variants[1, "no_op"][1]["prefill_seconds"] == 0
    table["latencies"][0]["decode_seconds"] = 9.0
    (tmp_path / "mine.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"cost was done with other settings .*latencies"):
        in_process(*words)


def test_an_existing_table_is_checked_before_a_job_queues(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    words = [*WORDS, "run_dir=unused", f"puzzle.measure.table={tmp_path / 'mine.json'}"]
    with pytest.raises(ValueError, match=r"mine\.json: .*engine"):
        check(compose("puzzle", words))
    check(compose("puzzle", [*words, f"puzzle.parent={tmp_path}"]))  # the parent does not exist yet
    check(compose("puzzle", [*words, "puzzle.stages=[search]"]))
    (tmp_path / "mine.json").write_text(json.dumps(filled_in(tmp_path / "form")))
    check(compose("puzzle", words))


def test_latencies_have_one_source() -> None:
    with pytest.raises(ValueError, match=r"puzzle.measure.enabled and puzzle.measure.table are both set"):
        settings(compose("puzzle", [*WORDS, "puzzle.measure={enabled: true, table: x.json}"])["puzzle"])
