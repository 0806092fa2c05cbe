"""One stage in shards: division, locks, and the same results as in one process."""

import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from nemo_ext.architecture.blocks import Block
from nemo_ext.job.config import compose
from nemo_ext.job.files import only_run_in
from nemo_ext.puzzle.job import Job
from nemo_ext.puzzle.score_file import append_scores, collect_scores, read_scores
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.stages.distill import Training, distill, trainable
from nemo_ext.puzzle.stages.library import Library, build
from nemo_ext.puzzle.stages.score import score_blocks
from nemo_ext.puzzle.stages.shards import Shard, only_shard_in, refuse_beside_shards
from nemo_ext.puzzle.variants import KEEP, LINEAR, NO_OP, Variant
from nemo_ext.puzzle.workspace import Workspace

SMALL = (
    "data=mock",
    'model.pattern="(*-)x3"',
    "megatron.hidden_size=64",
    "megatron.ffn_hidden_size=96",
    "megatron.seq_length=32",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=4",
    "megatron.num_workers=1",
    "train.tokens=1024",
    "puzzle.calibration={sequences: 8, batch: 2}",
    "puzzle.distill={steps: 60, batch: 2, together: 2, save_interval: 4}",
)
DISTILL = "puzzle.stages=[distill]"


def every(count: int) -> list[Shard]:
    return [Shard(number, count) for number in range(count)]


@st.composite
def libraries(draw: st.DrawFn) -> list[list[Variant]]:
    """Variants of some blocks, as from `variants`."""
    kinds = draw(st.lists(st.sampled_from("*-"), min_size=1, max_size=40))
    widths = draw(st.lists(st.integers(1, 9).map(lambda n: 16 * n), unique=True, max_size=6))
    found = []
    for number, kind in enumerate(kinds):
        key = "kv" if kind == "*" else "ffn"
        each = [Variant(number, f"{key}{width}", Block.from_values(kind, **{key: width})) for width in widths]
        whole = Variant(number, KEEP, Block.from_values(kind))
        found.append(
            [whole, *each, Variant(number, LINEAR, Block.from_values(kind, linear=True)), Variant(number, NO_OP, None)]
        )
    return found


@given(found=libraries(), count=st.integers(1, 50))
def test_every_variant_is_in_one_shard_and_shards_are_even(found: list[list[Variant]], count: int) -> None:
    shares = [shard.select(found) for shard in every(count)]

    for at, each in enumerate(found):
        assert Counter(v for share in shares for v in share[at]) == Counter(each)
        assert all(share[at] == [v for v in each if v in share[at]] for share in shares)  # in order
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for kind in {str(v.block) for each in found for v in each}:
        alike = [sum(str(v.block) == kind for each in share for v in each) for share in shares]
        assert max(alike) - min(alike) <= 1


def test_a_block_s_variants_are_not_all_in_one_shard() -> None:
    found = [[Variant(n, f"ffn{w}", Block.from_values("-", ffn=w)) for w in (64, 32)] for n in range(8)]
    # Every second variant would select only the wide ones.
    assert [Counter(v.name for each in shard.select(found) for v in each) for shard in every(2)] == 2 * [
        Counter({"ffn64": 4, "ffn32": 4})
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((DISTILL, "puzzle.shard=4/4"), "puzzle.shard=4/4: expected one of the shards 0/4 to 3/4"),
        ((DISTILL, "puzzle.shard=0/0"), "puzzle.shard=0/0: expected at least one shard"),
        ((DISTILL, "puzzle.shard=a/b"), "puzzle.shard=a/b: expected I/N"),
        ((DISTILL, "puzzle.shard=-1/4"), "puzzle.shard=-1/4: expected I/N"),
        ((DISTILL, "puzzle.shard=3"), "puzzle.shard=3: "),
        (("puzzle.shard=0/4",), "puzzle.shard=0/4 requires a single stage: add 'puzzle.stages=[distill]'"),
        (("puzzle.stages=[library]", "puzzle.shard=0/4"), "puzzle.shard=0/4 requires a single stage"),
        (("puzzle.stages=[distill,score]", "puzzle.shard=0/4"), "puzzle.shard=0/4 requires a single stage"),
    ],
)
def test_an_invalid_shard_is_refused(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        settings(compose("puzzle", ["data=mock", *overrides])["puzzle"])


def test_a_shard_locks_out_itself_and_runs_without_a_shard(tmp_path: Path) -> None:
    first, second = every(2)
    with only_shard_in(tmp_path, first, list), only_shard_in(tmp_path, second, list):
        with (
            pytest.raises(ValueError, match="0/2 is already running"),
            only_shard_in(tmp_path, first, list),
        ):
            pass
        with (
            only_run_in(tmp_path),
            pytest.raises(ValueError, match=r"shards are running in this directory \(0/2, 1/2\)"),
        ):
            refuse_beside_shards(tmp_path)
    with only_run_in(tmp_path):
        refuse_beside_shards(tmp_path)
        with (
            pytest.raises(ValueError, match="another run is using this directory"),
            only_shard_in(tmp_path, first, list),
        ):
            pass


def test_a_shard_that_may_not_begin_leaves_no_lock(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("not like this")

    with pytest.raises(ValueError, match="not like this"), only_shard_in(tmp_path, Shard(0, 2), refuse):
        pass
    with only_run_in(tmp_path):
        refuse_beside_shards(tmp_path)


@pytest.fixture
def workspace(tmp_path: Path) -> Callable[..., Workspace]:
    """The workspace of a command; parent and library are finished."""
    checkpoint = tmp_path / "parent" / "checkpoints" / "iter_0000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_text("weights")
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("3")

    def make(*overrides: str) -> Workspace:
        config: dict[str, Any] = compose("puzzle", ["data=mock", f"run_dir={tmp_path}", *overrides])
        return Workspace(config, settings(config["puzzle"]))

    make().finish("parent")
    make().finish("library")
    return make


def test_a_stage_is_finished_after_all_its_shards(workspace: Callable[..., Workspace]) -> None:
    first, last = (workspace(DISTILL, f"puzzle.shard={number}/3") for number in (0, 2))
    first.begin("distill")
    last.begin("distill")
    first.finish("distill")

    assert first.is_finished("distill") and not last.is_finished("distill")
    assert workspace().unfinished_shards("distill") == [Shard(1, 3), Shard(2, 3)]
    assert not workspace().is_finished("distill") and workspace().missing("score") == ["distill"]
    assert len({made.config for made in (first, last, workspace())}) == 3

    workspace().begin("distill")
    workspace().finish("distill")
    assert first.is_finished("distill") and last.is_finished("distill")
    assert not workspace().unfinished_shards("distill")
    assert not list(first.record("distill").parent.glob("*shard*"))


def test_settings_of_another_shard_are_refused(workspace: Callable[..., Workspace]) -> None:
    workspace(DISTILL, "puzzle.shard=0/3").begin("distill")
    for command in ((DISTILL, "puzzle.shard=1/3"), (DISTILL, "puzzle.shard=0/3"), ()):
        with pytest.raises(ValueError, match=r"distill was begun with other settings \(distill\.steps: 100 -> 7\)"):
            workspace(*command, "puzzle.distill.steps=7").is_finished("distill")
    with pytest.raises(ValueError, match=r"puzzle\.shard=1/4: distill was begun in 3 shards"):
        workspace(DISTILL, "puzzle.shard=1/4").begin("distill")
    workspace(DISTILL, "puzzle.shard=1/3").begin("distill")


def test_a_shard_requires_the_library(tmp_path: Path) -> None:
    config = compose("puzzle", [*SMALL, f"run_dir={tmp_path}", DISTILL, "puzzle.shard=0/3"])
    with pytest.raises(ValueError, match=r"puzzle\.shard=0/3: distill needs the output of library"):
        Job(config).run()
    assert not list(tmp_path.rglob("*.json"))


def test_a_run_is_refused_while_a_shard_runs(tmp_path: Path) -> None:
    with only_shard_in(tmp_path, Shard(1, 3), list), pytest.raises(ValueError, match="shards are running"):
        Job(compose("puzzle", [*SMALL, f"run_dir={tmp_path}"])).run()


def data(start: int) -> Iterator[torch.Tensor]:
    for step in itertools.count(start):
        yield torch.randint(0, 384, (4, 16), generator=torch.Generator().manual_seed(step))


def same(one: Library, other: Library, variants: Sequence[Variant]) -> bool:
    assert [one.notes(variant) for variant in variants] == [other.notes(variant) for variant in variants]
    pairs = [(one.read(variant), other.read(variant)) for variant in variants]
    return all(torch.equal(left[name], right[name]) for left, right in pairs for name in {**left, **right})


@pytest.mark.parametrize("rest", ["in shards", "without a shard"])
def test_shards_train_the_same_as_one_process(rest: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-*"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    whole, parts = Library(tmp_path / "whole"), Library(tmp_path / "parts")
    expected = distill(parent, by_block, library, whole, data, Training(steps=5))
    training = Training(steps=5, together=2, save_interval=2)
    shards = every(3)
    shares = {shard: shard.select([trainable([each]) for each in by_block]) for shard in shards}

    def stop(count: int) -> None:
        if (parts.folder / "in_training_1of3.pt").exists():
            raise KeyboardInterrupt

    distill(parent, shares[shards[0]], library, parts, data, training, shard=shards[0])
    with pytest.raises(KeyboardInterrupt):
        distill(parent, shares[shards[1]], library, parts, data, training, shard=shards[1], advance=stop)
    steps = 0

    def count(number: int) -> None:
        nonlocal steps
        steps += number

    first: list[int] = []

    def noted(start: int) -> Iterator[torch.Tensor]:
        first.append(start)
        return data(start)

    if rest == "in shards":
        for shard in shards[1:]:
            distill(parent, shares[shard], library, parts, noted, training, shard=shard)
        assert distill(parent, by_block, library, parts, lambda start: iter(()), training) == expected
    else:
        assert distill(parent, by_block, library, parts, noted, training, advance=count) == expected
        assert steps == 5 * len(trainable(by_block))
    assert first[0] == 2 and set(first[1:]) == {0}  # where the interrupted one was

    assert same(whole, parts, trainable(by_block))
    assert not list(parts.folder.glob("in_training*"))


def test_a_checkpoint_whose_variants_shards_have_trained_is_kept(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="-"')
    library, trained = Library(tmp_path / "library"), Library(tmp_path / "trained")
    build(parent, description, by_block, library, calibration=[])
    training = Training(steps=4, save_interval=2)

    def stop(count: int) -> None:
        if (trained.folder / "in_training.pt").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(parent, by_block, library, trained, data, training, advance=stop)
    distill(parent, by_block, library, trained, data, training, shard=Shard(0, 1))
    assert (trained.folder / "in_training.pt").exists()  # a shard must not touch it
    distill(parent, by_block, library, trained, lambda start: iter(()), training)
    assert not (trained.folder / "in_training.pt").exists()


def test_scores_of_shards_match_one_process(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-*"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    calibration = [next(data(step)) for step in range(2)]
    order = [(v.number + 1, v.name) for each in by_block for v in each]

    def score(variants: Sequence[Sequence[Variant]], name: str) -> None:
        score_blocks(parent, variants, lambda v: library.layer(parent, v), calibration, tmp_path / name)

    score(by_block, "whole.jsonl")
    for shard in (Shard(2, 3), Shard(0, 3)):
        score(shard.select(by_block), f"part{shard.number}.jsonl")
    parts = sorted(tmp_path.glob("part*"))
    collect_scores(tmp_path / "scores.jsonl", parts, order)
    score(by_block, "scores.jsonl")  # scores of the missing shard
    collect_scores(tmp_path / "scores.jsonl", [], order)

    assert (tmp_path / "scores.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not any(part.exists() for part in parts)


def test_other_scores_are_kept(tmp_path: Path, opened: Callable[..., Any]) -> None:
    parent, _, found = opened("llama_nemotron_tiny", 'model.pattern="-"')
    file = tmp_path / "scores.jsonl"
    score_blocks(parent, [found[0][:1]], lambda v: parent.layers[v.number], [next(data(0))], file)
    (kept,) = read_scores(file)
    collect_scores(file, [], [(7, "ffn8")])
    assert read_scores(file) == [kept]
    append_scores(tmp_path / "other.jsonl", [kept])
    collect_scores(file, [tmp_path / "other.jsonl"], [(kept.block, kept.variant)])
    assert read_scores(file) == [kept]


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nemo_ext.cli", "puzzle", *SMALL, f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=120)


def contents(run_dir: Path) -> dict[str, Any]:
    """Tensors, their metadata, scores and records of finished stages, by file."""
    found: dict[str, Any] = {"scores.jsonl": (run_dir / "blocks" / "scores.jsonl").read_text()}
    for file in sorted((run_dir / "blocks" / "trained").rglob("*")):
        if file.is_file():
            with safe_open(file, "numpy") as opened:
                tensors = {name: opened.get_tensor(name).tobytes() for name in sorted(opened.keys())}
                found[str(file.relative_to(run_dir))] = opened.metadata(), tensors
    for stage in ("library", "distill", "score"):
        record = json.loads((run_dir / "blocks" / "stages" / f"{stage}.json").read_text())
        found[stage] = record["settings"]
    return found


@pytest.mark.deep
def test_three_shards_one_of_them_killed_make_the_files_of_one_process(
    tmp_path: Path, in_process: Callable[..., str]
) -> None:
    """The killed shard is a separate process."""
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    parent = f"puzzle.parent={whole / 'parent'}"
    here = partial(in_process, *SMALL, f"run_dir={divided}", parent)
    in_process(*SMALL, f"run_dir={whole}", "puzzle.stages=[parent,library,distill,score]")
    here("puzzle.stages=[parent,library]")

    checkpoint = divided / "blocks" / "trained" / "in_training_1of3.pt"
    process = start(divided, parent, DISTILL, "puzzle.shard=1/3")
    try:
        deadline = time.monotonic() + 400
        while not checkpoint.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        kill(process)
    assert checkpoint.exists()  # in the middle
    said = [here(DISTILL, f"puzzle.shard={number}/3") for number in (0, 1)]
    assert all("are not finished yet" in each for each in said)
    assert not list((divided / "blocks" / "trained").glob("in_training*"))
    assert "distill, shard 0/3: finished before" in here(DISTILL, "puzzle.shard=0/3")
    with pytest.raises(ValueError, match=r"distill was begun with other settings \(distill\.steps: 60 -> 7\)"):
        here(DISTILL, "puzzle.shard=2/3", "puzzle.distill.steps=7")
    assert "all shards are finished" in here(DISTILL, "puzzle.shard=2/3")
    here(DISTILL)
    for number in (0, 2):
        here("puzzle.stages=[score]", f"puzzle.shard={number}/3")
    rest = here("puzzle.stages=[parent,library,distill,score]")

    assert "distill: finished before" in rest
    assert "score: shards 1/3 are not finished; the rest of their work is done here" in rest
    assert contents(divided) == contents(whole)
    assert not list((divided / "blocks").glob("scores_*")) and not list((divided / "blocks").rglob("*shard*"))
    for number in range(3):
        assert (divided / "child" / "shards" / f"{number}of3" / "config.yaml").is_file()
