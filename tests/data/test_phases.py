"""First steps of phases, counts of tokens and samples, configs of segments, and invalid phases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.blends.blend import shares_of
from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
from nemo_ext.data.packs.sample_files import write_samples
from nemo_ext.data.phases import Piece, Plan, data_paths, describe_shared_streams, most_drawn, plan_of, segments
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.data.training import check_settings
from nemo_ext.job.config import compose


def planned(config: dict[str, Any]) -> Plan:
    plan = plan_of(config)
    assert plan is not None
    return plan


def config(phases: dict[str, Any], *, tokens: float, **megatron: Any) -> dict[str, Any]:
    flags = {"seq_length": 64, "global_batch_size": 8, "train_iters": round(tokens / 512), "lr_warmup_iters": 3}
    return {"train": {"tokens": tokens}, "phases": phases, "megatron": {**flags, "lr_decay_style": "WSD", **megatron}}


SIZES = st.sampled_from([None, (64, 8), (128, 4), (256, 8), (32, 16), (128, 1)])


@given(st.lists(st.tuples(st.integers(4096, 10**7), SIZES), min_size=1, max_size=6))
def test_every_switch_falls_on_the_nearest_step(drawn: list[tuple[int, tuple[int, int] | None]]) -> None:
    phases = {
        f"phase{n}": {"tokens": tokens}
        | ({} if sizes is None else {"megatron": {"seq_length": sizes[0], "global_batch_size": sizes[1]}})
        for n, (tokens, sizes) in enumerate(drawn)
    }
    plan = planned(config(phases, tokens=sum(tokens for tokens, _ in drawn)))

    expected = step = sample = token = 0
    for phase, (tokens, sizes) in zip(plan.phases, drawn, strict=True):
        seq_length, batch = sizes or (64, 8)
        assert (phase.seq_length, phase.global_batch_size) == (seq_length, batch)
        # No gaps and no overlaps between phases; rounding errors do not accumulate.
        assert (phase.first_step, phase.first_sample, phase.first_token) == (step, sample, token)
        expected += tokens
        step, sample, token = step + phase.steps, sample + phase.steps * batch, token + phase.steps * batch * seq_length
        assert abs(token - expected) <= batch * seq_length / 2
        assert plan.at_step(phase.first_step + 1) is phase and plan.at_step(phase.last_step) is phase
        assert plan.at_sample(phase.first_sample) is phase and plan.at_sample(sample - 1) is phase
        assert plan.tokens_at_step(phase.last_step) == token and plan.samples_at_step(phase.last_step) == sample
    middle = plan.samples_at_step(step // 2)
    assert plan.tokens_at_sample(middle) == plan.tokens_at_step(step // 2)
    assert sum(len(segment) for segment in plan.segments) == len(plan.phases)


def test_phases_with_the_same_flags_form_a_segment() -> None:
    phases: dict[str, Any] = {
        "short": {"tokens": 512 * 60},
        "other_blend": {"tokens": 512 * 10, "megatron": {"seq_length": 64}},  # equal to the run's
        "long": {"tokens": 512 * 30, "megatron": {"seq_length": 128, "global_batch_size": 4, "rotary_base": 500000}},
    }
    run = config(phases, tokens=512 * 100, lr_wsd_decay_iters=20)

    first, second = segments(run, planned(run), {"other_blend": ["1", "prose"]})

    assert first["segment"]["phases"] == ["short", "other_blend"] and second["segment"]["phases"] == ["long"]
    assert [segment["megatron"]["train_iters"] for segment in (first, second)] == [70, 100]
    assert second["megatron"]["seq_length"] == 128 and second["megatron"]["rotary_base"] == 500000
    assert first["megatron"]["max_position_embeddings"] == second["megatron"]["max_position_embeddings"] == 128
    for segment in (first, second):
        assert segment["segment"]["whole"]["train_iters"] == 100 and segment["segment"]["whole"]["seq_length"] == 64
        assert segment["segment"]["train_data_path"] == {"other_blend": ["1", "prose"]}
        assert plan_of(segment) == plan_of(run)  # ranks see the whole run


def test_a_learning_rate_changes_from_start_to_end() -> None:
    for style in ("linear", "cosine", "minus_sqrt"):
        piece = Piece(start=3.0, end=1.0, style=style)
        assert piece.at(0.0) == pytest.approx(3.0) and piece.at(1.0) == pytest.approx(1.0)
    assert Piece(start=3.0, end=1.0).at(0.25) == pytest.approx(2.5)
    assert Piece(start=3.0, end=3.0, style="constant").at(0.7) == 3.0
    assert Piece(start=3.0) == Piece(start=3.0, style="constant") and Piece(start=3.0).at(0.7) == 3.0
    assert Piece(start=3.0, end=1.0) == Piece(start=3.0, end=1.0, style="linear")


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({"a": {"tokens": 5120}}, r"phases add up to 5120 tokens \(a 5120\), but train\.tokens=51200"),
        ({"a": {"tokens": 51000}, "b": {"tokens": 200}}, r"phases\.b\.tokens=200 is less than one step of 512 tokens"),
        ({"a": {"tokens": 0}}, r"phases\.a\.tokens=0: .* greater than 0"),
        ({"a": 51200}, r"phases\.a=51200: expected a section"),
        ({"a": {"token": 51200}}, r"phases\.a: unknown key 'token': did you mean 'tokens'"),
        ({"a": {"tokens": 51200, "lr": {"start": 1, "style": "liner"}}}, r"phases\.a\.lr\.style='liner': .*'linear'"),
        ({"a": {"tokens": 51200, "lr": {"start": -1}}}, r"phases\.a\.lr\.start=-1"),
        (
            {"a": {"tokens": 51200, "lr": {"start": 1e-4, "style": "linear"}}},
            r"phases\.a: lr\.style=linear requires lr\.end",
        ),
        ({"a": {"tokens": 51200, "lr": {"start": "x"}}}, r"phases\.a\.lr\.start='x': .*number"),
        ({"a": {"tokens": 51200, "lr": 1e-5}}, r"phases\.a\.lr=1e-05: "),
        ({"a": {"tokens": 51200, "data": 5}}, r"phases\.a\.data=5: "),
        ({"a": {"tokens": 51200, "megatron": "x"}}, r"phases\.a\.megatron='x': "),
        ([{"tokens": 51200}], "phases must be a mapping"),
        ({"a": {"tokens": 51200, "megatron": {"seq_length": 0}}}, r"phases\.a\.megatron\.seq_length must be a whole"),
        (
            {"a": {"tokens": 51200, "megatron": {"seq_length": None}}},
            r"phases\.a\.megatron\.seq_length must be a whole",
        ),
    ],
)
def test_an_invalid_phase_is_an_error(phases: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(config(phases, tokens=51200))


def test_an_invalid_size_of_the_whole_run_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"^megatron\.seq_length must be a whole"):
        plan_of(config({"a": {"tokens": 51200}}, tokens=51200, seq_length=64.0))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("exit_interval", 5), ("rampup_batch_size", "4 4 100"), ("weight_decay_incr_style", "linear")],
)
def test_flags_that_phases_cannot_have_are_refused(flag: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^megatron\.{flag}.* cannot be combined with phases"):
        plan_of(config({"a": {"tokens": 51200}}, tokens=51200, **{flag: value}))
    with pytest.raises(ValueError, match=rf"^phases\.a\.megatron\.{flag}.* cannot be combined with phases"):
        plan_of(config({"a": {"tokens": 51200, "megatron": {flag: value}}}, tokens=51200))


@pytest.mark.parametrize(("flag", "instead"), [("train_data_path", "set phases.a.data"), ("seed", "megatron.seed")])
def test_flags_of_the_whole_run_are_refused_in_a_phase(flag: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"phases\.a\.megatron\.{flag} applies to the whole run: .*{instead}"):
        plan_of(config({"a": {"tokens": 51200, "megatron": {flag: 7}}}, tokens=51200))


@given(weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=12), count=st.integers(0, 3000))
def test_no_stream_gives_more_sequences_than_the_bound(weights: list[float], count: int) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    shares = [weight / sum(weights) for weight in weights]
    chosen, within = np.zeros(count, dtype=np.int16), np.zeros(count, dtype=np.int64)
    helpers.build_blending_indices(chosen, within, shares, len(shares), count, False)

    ahead = [most_drawn(share, count) for share in shares] - np.bincount(chosen, minlength=len(shares))

    assert ahead.min() >= 0, "sequences would be read again"
    assert ahead.max() <= 2


def test_notices_about_streams_of_several_phases(tmp_path: Path) -> None:
    for name in "ab":
        write_index(tmp_path / f"{name}.idx", np.array([10_000]), np.uint16)
        (tmp_path / f"{name}.bin").write_bytes(bytes(20_000))
    half = ["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")]
    phases = {"one": {"tokens": 25600}, "two": {"tokens": 25600, "data": {"directory": "d"}}}
    run = config(phases, tokens=51200, train_data_path=half)
    first, *_ = segments(run, planned(run), {"two": ["1", str(tmp_path / "b")]})

    resumed, often = describe_shared_streams(first, planned(run), max_epochs=3)

    assert resumed == f"phase two resumes {tmp_path / 'b'} after 200 sequences of 64"
    assert (
        often
        == f"data: some streams are read more than max_epochs=3 times over all phases: {tmp_path / 'b'} 3.84 times; "
        "add text or lower their shares"
    )


def test_packs_in_a_phase_require_a_loss_per_token(tmp_path: Path) -> None:
    file = write_samples(tmp_path / "samples", [(np.arange(20), np.ones(20))] * 9, vocab_size=257)
    write_packed(tmp_path / "packs", [file], PackingSettings(capacity=64), vocab_size=257, progress=False)

    def paths(**flags: Any) -> dict[str, list[str] | None]:
        packs = {"tokens": 25600, "data": {"packed": {"train": str(tmp_path / "packs")}}, "megatron": flags}
        run = config({"text": {"tokens": 25600}, "packs": packs}, tokens=51200, tokenizer_type="NullTokenizer")
        return data_paths({**run, "data": {"directory": "d"}}, planned(run))

    assert paths(calculate_per_token_loss=True) == {"text": None, "packs": [str(tmp_path / "packs")]}
    with pytest.raises(ValueError, match=r"phases\.packs\.data contains packs, .*set calculate_per_token_loss to true"):
        paths()


def test_validation_packs_require_the_same_length_in_all_phases(tmp_path: Path) -> None:
    run = config({"short": {"tokens": 25600}, "long": {"tokens": 25600, "megatron": {"seq_length": 128}}}, tokens=51200)
    packed = {"train": str(tmp_path / "packs"), "valid": str(tmp_path / "packs")}
    with pytest.raises(
        ValueError, match=r"phases\.long\.megatron\.seq_length=128, but the run validates on packs .* 64"
    ):
        data_paths({**run, "data": {"packed": packed}}, planned(run))


@pytest.mark.parametrize("place", ["run", "phase"])
@pytest.mark.parametrize(
    "data", [{"packed": {"train": "made/later"}}, {"mixed_lengths": {"short": 16, "short_share": 0.5}}]
)
def test_rows_of_many_samples_require_a_microbatch_of_one_even_before_they_exist(place: str, data: object) -> None:
    flags = {"seq_length": 64, "global_batch_size": 4, "micro_batch_size": 2}
    asked = {"data": data} if place == "run" else {"phases": {"packs": {"tokens": 25600, "data": data}}}
    with pytest.raises(ValueError, match=r"data\.(packed|mixed_lengths) requires megatron\.micro_batch_size=1"):
        check_settings({**asked, "megatron": flags})
    check_settings({**asked, "megatron": {**flags, "micro_batch_size": 1}})


def test_a_phase_can_name_its_data() -> None:
    run = compose("train", ["+phases.a={tokens: 5e5, data: local_text_prose}", "data_root=else where"])
    assert run["phases"]["a"]["data"]["directory"] == "else where/local_text"
    assert [stream["weight"] for stream in run["phases"]["a"]["data"]["streams"]] == [0.1, 0.3, 0.6]
    with pytest.raises(ValueError, match=r"phases\.a\.data=prose: .*Could not find 'data/prose'"):
        compose("train", ["+phases.a={tokens: 5, data: prose}"])


def test_weights_that_add_up_to_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="the weights add up to 0; make at least one positive"):
        shares_of(["0", "a", "0", "b"])
