"""Phases in Megatron's trainer: positions of data, the learning rate by tokens, interruptions."""

import io
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_ext import cli, launch
from nemo_ext.data.phases import Plan, plan_of
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.launch import _check_same_past

pytestmark = pytest.mark.xdist_group(name="phases")
"""Fixtures that train are made once."""

FLAGS = {
    "seq_length": 64,
    "global_batch_size": 8,
    "train_iters": 100,
    "lr_warmup_iters": 10,
    "lr_decay_iters": None,
    "lr_wsd_decay_iters": 20,
}


def planned(phases: dict[str, Any]) -> Plan:
    plan = plan_of({"train": {"tokens": 51200}, "phases": phases, "megatron": FLAGS})
    assert plan is not None
    return plan


def rates(plan: Plan, style: str) -> list[float]:
    """The learning rate of every step, with samples counted like in the trainer."""
    from nemo_ext.megatron.phases import TokenSchedule

    group: dict[str, Any] = {"max_lr": 1e-3, "min_lr": 1e-5}
    schedule = TokenSchedule(
        SimpleNamespace(param_groups=[group]),
        plan=plan,
        whole=FLAGS,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=1,
        lr_wsd_decay_style="minus_sqrt",
    )
    found = []
    for step in range(1, plan.phases[-1].last_step + 1):
        found.append(group["lr"])
        schedule.step(plan.at_step(step).global_batch_size)
    return found


@pytest.mark.parametrize("style", ["WSD", "cosine", "linear"])
def test_the_learning_rate_follows_tokens_in_any_phases(megatron: None, style: str) -> None:
    alike = rates(planned({"all": {"tokens": 51200}}), style)
    # With the same tokens per step, the same rate at each step; with twice as many, the rate of every second step.
    longer = {"seq_length": 128, "global_batch_size": 4}
    assert rates(planned({"a": {"tokens": 20480}, "b": {"tokens": 30720, "megatron": longer}}), style) == pytest.approx(
        alike
    )
    large = rates(planned({"a": {"tokens": 20480}, "b": {"tokens": 30720, "megatron": {"seq_length": 128}}}), style)
    assert large[:40] == pytest.approx(alike[:40]) and large[40:] == pytest.approx(alike[40::2])
    assert max(alike) == pytest.approx(1e-3) and alike[0] == 0


def test_a_phase_may_have_its_own_rate(megatron: None) -> None:
    lr = {"start": 4e-4, "end": 0.0}
    found = rates(planned({"a": {"tokens": 25600}, "anneal": {"tokens": 25600, "lr": lr}}), "WSD")
    assert found[:50] == pytest.approx(rates(planned({"a": {"tokens": 51200}}), "WSD")[:50])
    assert found[50:] == pytest.approx([4e-4 * (1 - n / 50) for n in range(50)])


def test_every_sample_belongs_to_its_phase(megatron: None) -> None:
    from nemo_ext.megatron.phases import PhasedDataset

    plan = planned({"a": {"tokens": 25600}, "b": {"tokens": 5120}, "c": {"tokens": 20480}})
    names = {"a": 0, "b": 1000, "c": 2000}
    parts: Any = [(phase, torch.arange(10**4) + names[phase.name]) for phase in plan.phases]
    samples = PhasedDataset(parts)
    assert len(samples) == 800
    assert [int(samples[n]) for n in (0, 399, 400, 479, 480, 799)] == [0, 399, 1000, 1079, 2000, 2319]
    later = PhasedDataset(parts[1:])
    assert int(later[400]) == 1000 and len(later) == 800
    with pytest.raises(IndexError, match=r"sample 399 is not among this start's samples 400 to 799"):
        later[399]


def test_only_later_phases_of_a_started_run_may_change() -> None:
    def run(a: int, b: int, c: int, *, own: str = "web", path_of_c: str = "late", **megatron: Any) -> dict[str, Any]:
        phases = {"a": {"tokens": a}, "b": {"tokens": b}, "c": {"tokens": c, "data": {"directory": "d"}}}
        return {
            "train": {"tokens": 51200},
            "phases": phases,
            "megatron": {**FLAGS, "train_data_path": ["1", own], "seed": 1, **megatron},
            "segment": {"train_data_path": {"a": None, "b": None, "c": ["1", path_of_c]}},
        }

    before = run(20480, 20480, 10240)
    _check_same_past(before, run(20480, 25600, 5120), 60, Path("run"))
    _check_same_past(before, run(20480, 20480, 10240, path_of_c="other"), 60, Path("run"))
    for other, differs in (
        (run(25600, 15360, 10240), "steps"),
        (run(20480, 20480, 10240, own="prose"), "data"),  # the run's own data, which no phase names
        (run(20480, 20480, 10240, seed=2), "seed"),
    ):
        with pytest.raises(
            ValueError, match=rf"run is at step 60, and its phases up to that step .*\({differs} differ\)"
        ):
            _check_same_past(before, other, 60, Path("run"))
    with pytest.raises(ValueError, match="run was begun without phases"):
        _check_same_past({**before, "phases": {}}, before, 60, Path("run"))
    with pytest.raises(ValueError, match="run was begun with phases"):
        _check_same_past(before, {**before, "phases": {}}, 60, Path("run"))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Two streams of 640 documents of 100 tokens, no token twice; blends of them by name."""
    folder = tmp_path_factory.mktemp("streams")
    for number, name in enumerate("ab"):
        for split in ("train", "valid"):
            (np.arange(64_000, dtype=np.int32) + 100_000 * number).tofile(folder / f"{name}_{split}.bin")
            write_index(folder / f"{name}_{split}.idx", np.full(640, 100), np.int32)
    a, b = (str(folder / f"{name}_train") for name in "ab")
    return {"half": ["0.5", a, "0.5", b], "other": ["0.4", a, "0.6", b], "b": ["1", b]}


def read_by_phases(
    monkeypatch: pytest.MonkeyPatch,
    blends: dict[str, list[str]],
    phases: dict[str, Any],
    data: dict[str, str] | None = None,
) -> dict[str, list[int]]:
    """The tokens of each phase, by segment; the run's own blend is `half`."""
    import nemo_ext.megatron.phases as module
    from nemo_ext.megatron.arguments import command_line, parse_arguments

    config = compose("train", ["data=mock", "run_dir=unused", "megatron.seq_length=64"])
    config["megatron"] |= {"global_batch_size": 8, "num_workers": 0, "mock_data": False, "micro_batch_size": 1}
    config["megatron"] |= {"vocab_size": 300_000, "max_position_embeddings": 256, "train_data_path": blends["half"]}
    config["train"]["tokens"], config["phases"] = sum(phase["tokens"] for phase in phases.values()), phases
    paths = {name: blends[data[name]] if data and name in data else None for name in phases}
    found: dict[str, list[int]] = {}
    plan = plan_of(config)
    assert plan is not None
    for segment in plan.segments:
        changed = {**config, "megatron": {**config["megatron"], **segment[0].megatron}}
        arguments = parse_arguments(command_line(changed), world_size=1)
        arguments.mixed_lengths = None
        monkeypatch.setattr(module, "get_args", lambda arguments=arguments: arguments)
        names = {"phases": [phase.name for phase in segment], "train_data_path": paths}
        rows, _, _ = module.phased_datasets(plan, names, [0, 0, 0])
        for phase in segment:
            numbers = range(phase.first_sample, phase.first_sample + phase.samples)
            found[phase.name] = [token for n in numbers for token in rows[n]["tokens"].tolist()]
    return found


def test_a_phase_continues_in_each_stream_for_any_blend(
    megatron: None, monkeypatch: pytest.MonkeyPatch, streams: dict[str, list[str]]
) -> None:
    phases = {"one": {"tokens": 61440}, "two": {"tokens": 20480}, "three": {"tokens": 20480}}
    found = read_by_phases(monkeypatch, streams, phases, {"two": "other", "three": "half"})
    one, two, three = (set(found[name]) for name in phases)
    assert [len(each) for each in (one, two, three)] == [61440, 20480, 20480]
    assert not one & two and not (one | two) & three, "a token came twice before all were read"


def test_changing_a_later_phase_does_not_change_earlier_data(
    megatron: None, monkeypatch: pytest.MonkeyPatch, streams: dict[str, list[str]]
) -> None:
    # 0.8 epochs, then to 1.6 and 2.4 in all: Megatron's own order would be another one each time.
    shorter = read_by_phases(monkeypatch, streams, {"one": {"tokens": 102_400}, "two": {"tokens": 102_400}})
    longer = read_by_phases(monkeypatch, streams, {"one": {"tokens": 102_400}, "two": {"tokens": 204_800}})
    assert shorter["one"] == longer["one"] and shorter["two"] == longer["two"][:102_400]
    # Each epoch reads everything once, but for the end that fills no sequence.
    first = [token for token in shorter["one"] + shorter["two"] if token < 100_000][:63_900]
    assert len(set(first)) > 63_800
    at_another_length = {"one": {"tokens": 20_480}, "long": {"tokens": 20_480, "megatron": {"seq_length": 128}}}
    assert len(read_by_phases(monkeypatch, streams, at_another_length)["long"]) == 20_480


SMALL = (
    "recipe=nemotron3_nano/quickstart_phases",
    "model.pattern=M*-",
    "train.tokens=163840",
    "megatron.save_interval=4",
    "megatron.eval_interval=1000",
    "megatron.eval_iters=1",
    "megatron.hidden_size=64",
)
"""Forty steps of 4096 tokens: 20 at 128, 16 at 256, 4 of prose."""


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, fork_ranks: Callable[..., None]) -> tuple[Path, str]:
    """A complete run with forked ranks, and its output."""
    folder, out = tmp_path_factory.mktemp("phases"), io.StringIO()
    words = ["nemo-ext", "train", *SMALL, f"run_dir={folder / 'run'}", f"data_root={folder / 'data'}"]
    code: object = None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr(
            launch, "_run_ranks", lambda run_dir, ranks, *_: fork_ranks(run_dir / run_directory.CONFIG, ranks)
        )
        patch.setattr(sys, "argv", words)
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
    assert not code, out.getvalue()
    return folder, out.getvalue()


@pytest.mark.slow
def test_one_command_runs_all_phases(whole: tuple[Path, str]) -> None:
    folder, out = whole
    lines = steps(folder / "run")
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["tokens"] for line in lines] == [4096 * n for n in range(1, 41)]
    assert re.search(r"^prose +37 +4 ", out, re.MULTILINE)  # said before the start
    # WSD over the whole run: the decay begins after step 32, four steps before the blend changes. A step logs the next
    # one's rate.
    peak = max(line["lr"] for line in lines)
    assert [line["step"] for line in lines if line["lr"] == pytest.approx(peak)] == list(range(2, 33))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param((26,), marks=pytest.mark.slow, id="in the second segment"),
        # Ten steps before the last one, so that a run does not end before the kill; in both segments.
        pytest.param(sorted(random.Random(5).sample(range(3, 31), 3)), marks=pytest.mark.deep, id="three times"),
    ],
)
def test_killed_at_any_step_it_resumes_on_the_same_sample(
    whole: tuple[Path, str], launched: Callable[..., str], tmp_path: Path, stops: Sequence[int]
) -> None:
    folder, _ = whole
    run_dir = tmp_path / "run"
    words = ("train", *SMALL, f"run_dir={run_dir}", f"data_root={folder / 'data'}")
    for stop in stops:
        assert "ended at step" in launched(*words, kill_at=stop), stop
    launched(*words)
    for line, expected in zip(steps(run_dir), steps(folder / "run"), strict=True):
        for name in ("step", "tokens", "loss", "lr", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (line, expected)


@pytest.mark.slow
def test_a_phase_of_packs_follows_text_and_is_validated_on_it(
    whole: tuple[Path, str], launched: Callable[..., str], tmp_path: Path
) -> None:
    from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
    from nemo_ext.data.packs.sample_files import write_samples

    answers = [(np.full(40, 65 + n % 20), np.arange(40) >= 20) for n in range(200)]
    file = write_samples(tmp_path / "answers", answers, vocab_size=257)
    write_packed(tmp_path / "packs", [file], PackingSettings(capacity=128), vocab_size=257, progress=False)
    words = (
        "recipe=nemotron3_nano/quickstart",
        "model.pattern=M*-",
        "megatron.hidden_size=64",
        "megatron.seq_length=128",
    )
    words = (*words, "megatron.micro_batch_size=1", "megatron.global_batch_size=8", "train.tokens=12288")
    words = (*words, "megatron.eval_interval=6", "megatron.eval_iters=1", "megatron.calculate_per_token_loss=true")
    packs = f"{{tokens: 6144, data: {{packed: {{train: {tmp_path / 'packs'}}}}}}}"
    words = (*words, f"+phases={{text: {{tokens: 6144}}, packs: {packs}}}", f"data_root={whole[0] / 'data'}")

    launched("train", *words, f"run_dir={tmp_path / 'run'}")

    lines = run_directory.read_metrics(tmp_path / "run" / run_directory.METRICS)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == list(range(1, 13)) and losses[12] < losses[7] - 0.3  # of constant answers
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 12, 12]  # at intervals, and at the end
