"""A student learns its teacher's logits, in one process or from files, on one or more ranks; nothing else changes."""

import importlib.util
import io
import json
import math
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.functional import kl_div, log_softmax

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.checkpoint.beside import EXTRAS
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.megatron import divergence
from nemo_ext.megatron.check import check
from nemo_ext.megatron.distillation import check_same_tokens
from nemo_ext.megatron.divergence import kl_divergence
from nemo_ext.megatron.session import build_model, load_weights, take_tensors

pytestmark = pytest.mark.usefixtures("megatron")
"""In the worker that has imported Megatron, so that runs from which others start are made once."""

Train = Callable[..., list[dict[str, Any]]]
Build = Callable[..., torch.nn.Module]

SHORT = ("train.tokens=1536", "train.warmup_tokens=0", "megatron.save_interval=2")
"""Three steps of eight sequences, a checkpoint after two."""
DENSE = "model=llama_nemotron_tiny"
"""A student without experts and Mamba for the hybrid teacher; both have 384 rows of vocabulary."""
VOCABULARY = 384
SMALL_BATCHES = ("megatron.seq_length=64", "megatron.micro_batch_size=4", "megatron.global_batch_size=8")
FROZEN = (
    "megatron.freeze_all_layers=true",
    "megatron.async_save=true",
    "megatron.use_persistent_ckpt_worker=true",
    "megatron.async_strategy=mcore",
    "megatron.logits_save_dtype=fp32",
    "megatron.eval_iters=0",
)


def losses(lines: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in lines]


def checkpoints(run_dir: Path) -> Path:
    return run_dir / run_directory.CHECKPOINTS


def keys(run_dir: Path) -> set[str]:
    """Keys in the newest checkpoint, without the optimizer's state."""
    folder = checkpoints(run_dir) / f"iter_{run_directory.last_checkpoint(run_dir):07d}"
    found = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {key for key, stored in found.items() if hasattr(stored, "size") and "optimizer." not in key}


@pytest.fixture(scope="module")
def teacher(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a hybrid MoE model with confident predictions, made without training."""
    return made_teacher(tmp_path_factory.mktemp("teacher"))


def made_teacher(run_dir: Path, *words: str) -> Path:
    from megatron.core import dist_checkpointing

    config = compose("train", [f"run_dir={run_dir}", "data=mock", *words])
    torch.manual_seed(3)
    model = build_model(config)[0]
    with torch.no_grad():
        model.output_layer.weight.mul_(20)
    folder = checkpoints(run_dir) / "iter_0000010"
    folder.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    (checkpoints(run_dir) / "latest_checkpointed_iteration.txt").write_text("10")
    run_directory.write_config(run_dir, config)
    return run_dir


@pytest.fixture(scope="module")
def online(single: Path, tmp_path_factory: pytest.TempPathFactory, train_ranks: Train) -> tuple[Path, list[Any]]:
    """A run of a dense student with an online teacher, whose eight most probable tokens are distinguished."""
    run_dir = tmp_path_factory.mktemp("online")
    return run_dir, train_ranks(run_dir, *SHORT, DENSE, f"distillation.teacher={single}", "distillation.top_k=8")


# The divergence itself


def logits(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, *shape, generator=generator)
    return student.requires_grad_(), 2 * teacher


def reference(student: Tensor, teacher: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    own, target = log_softmax(student / temperature, -1), log_softmax(teacher / temperature, -1)
    if top_k is not None:
        places = teacher.topk(top_k).indices
        rest = torch.ones_like(own, dtype=torch.bool).scatter_(-1, places, False)
        own, target = (
            torch.cat([each.gather(-1, places), each.masked_fill(~rest, -torch.inf).logsumexp(-1, True)], -1)
            for each in (own, target)
        )
    return kl_div(own, target, reduction="none", log_target=True).sum(-1) * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("at_once", [None, 80])
def test_divergence_and_gradient_equal_those_of_torch(
    temperature: float, top_k: int | None, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and in parts of two tokens with one left, with the teacher's memory in another order."""
    student, teacher = logits(5, 3, 40)
    weights = torch.rand(5, 3)
    if at_once is not None:
        monkeypatch.setattr(divergence, "_IN_CACHE", at_once)
        teacher = teacher.transpose(0, 1).contiguous().transpose(0, 1)

    got = kl_divergence(student, teacher, temperature=temperature, top_k=top_k)
    expected = reference(student, teacher, temperature, top_k)

    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad((each * weights).sum(), student)[0] for each in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("top_k", [40, 1000])
def test_top_k_of_the_full_vocabulary_is_the_full_divergence(top_k: int) -> None:
    student, teacher = logits(5, 3, 40)

    torch.testing.assert_close(kl_divergence(student, teacher, top_k=top_k), kl_divergence(student, teacher))


def test_the_remaining_tokens_keep_their_mass() -> None:
    """Renormalised over one token, the divergence would be 0 for any student."""
    student, teacher = torch.tensor([[0.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, 0.0, 0.0, 0.0]])

    got = kl_divergence(student, teacher, top_k=1)

    first = teacher.softmax(-1)[0, 0]
    expected = first * (first / 0.25).log() + (1 - first) * ((1 - first) / 0.75).log()
    assert got.item() == pytest.approx(expected.item(), rel=1e-5) and got > 0.1


def test_logits_may_be_overwritten_before_the_backward_pass() -> None:
    student, teacher = logits(2, 1, 10)
    expected = torch.autograd.grad(kl_divergence(student, teacher).sum(), student)[0]

    divergence = kl_divergence(student, teacher)
    with torch.no_grad():
        student.zero_()  # as Megatron's cross entropy does in float32
    got = torch.autograd.grad(divergence.sum(), student)[0]

    torch.testing.assert_close(got, expected)


@pytest.mark.deep
def test_a_vocabulary_divided_among_ranks_has_the_same_divergence(
    on_ranks: Callable[..., None], tmp_path: Path
) -> None:
    student, teacher = logits(5, 3, 40)
    with torch.no_grad():
        teacher[0, 0, :] = 0  # ties: whichever tokens are chosen, there are top_k of them
        student[0, 0, :] = 0
    weights, cases = torch.rand(5, 3), []
    for top_k, temperature in ((None, 1.0), (None, 2.0), (7, 1.0), (30, 2.0), (40, 1.0)):
        kl = kl_divergence(student, teacher, temperature=temperature, top_k=top_k)
        cases.append((top_k, temperature, kl.detach(), torch.autograd.grad((kl * weights).sum(), student)[0]))
    tensors = {"student": student.detach(), "teacher": teacher, "weights": weights, "cases": cases}
    torch.save(tensors, tmp_path / "tensors.pt")

    on_ranks(Path(__file__).with_name("divergence_rank.py"), tmp_path)


# Online teacher, in this process


def batch() -> Iterator[dict[str, Tensor]]:
    """Two sequences with 104 unmasked tokens."""
    tokens = torch.randint(0, VOCABULARY, (2, 65), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 64)
    mask[0, 40:] = 0
    positions = torch.arange(64).expand(2, 64)
    yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions, "loss_mask": mask}


def config_of(teacher: Path, *overrides: str) -> dict[str, Any]:
    run = ("run_dir=unused", "data=mock", "megatron.seq_length=64", f"distillation.teacher={teacher}")
    return compose("train", [*run, *overrides])


def gradients(student: torch.nn.Module, distillation: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and logged values of one step."""
    from nemo_ext.megatron.forward_step import forward_step

    student.zero_grad()
    output, loss_function = forward_step(batch(), student, distillation=distillation)
    loss, _, logged = loss_function(output)
    loss.backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}, logged


def test_losses_are_weighted_and_the_teacher_is_unchanged(teacher: Path, build: Build) -> None:
    from nemo_ext.megatron.distillation import OnlineTeacher

    student = build(DENSE, "megatron.seq_length=64")
    lm_loss = student.compute_language_model_loss
    plain, logged = gradients(student, None)
    (lm, tokens) = logged["lm loss"]
    steps = {}
    for weights in ((1.0, 0.0), (0.5, 2.0)):
        student.compute_language_model_loss = lm_loss
        given = [f"distillation.{name}_weight={weight}" for name, weight in zip(("kl", "lm"), weights, strict=True)]
        distillation = OnlineTeacher(config_of(teacher, DENSE, *given))
        distillation.attach([student])
        before = take_tensors(distillation.teacher)
        steps[weights], logged = gradients(student, distillation)

        torch.testing.assert_close(logged["lm loss"], torch.stack([lm, tokens]))
        assert logged["kl to teacher"][0] > 0 and logged["kl to teacher"][1] == tokens == 104
        assert all(torch.equal(value, before[key]) for key, value in take_tensors(distillation.teacher).items())
        assert not any(parameter.requires_grad for parameter in distillation.teacher.parameters())
    for name, gradient in steps[0.5, 2.0].items():
        torch.testing.assert_close(gradient, 0.5 * steps[1.0, 0.0][name] + 2 * plain[name], rtol=1e-4, atol=1e-5)
    assert not any("teacher" in name for name, _ in student.named_modules())


def test_multi_token_prediction_learns_beside_the_divergence(build: Build, tmp_path: Path) -> None:
    """Depths have their own losses as in other runs, and the teacher's own depths have no part in it."""
    from nemo_ext.megatron.distillation import OnlineTeacher

    student_words = (DENSE, "model.pattern=*-/*-/*-", "megatron.seq_length=64")
    teacher = made_teacher(tmp_path, "model.pattern=ME*-/*E", "megatron.mtp_use_repeated_layer=true")
    student = build(*student_words)
    lm_loss = student.compute_language_model_loss
    plain, _ = gradients(student, None)
    steps = {}
    for weights in ((1.0, 0.0), (0.5, 2.0)):
        student.compute_language_model_loss = lm_loss
        given = [f"distillation.{name}_weight={weight}" for name, weight in zip(("kl", "lm"), weights, strict=True)]
        distillation = OnlineTeacher(config_of(teacher, *student_words, *given))
        distillation.attach([student])
        steps[weights], logged = gradients(student, distillation)
        assert logged["kl to teacher"][0] > 0 and logged["kl to teacher"][1] == 104
    student.compute_language_model_loss = lm_loss
    student.config.mtp_loss_scaling_factor = 0.0
    main, _ = gradients(student, None)

    assert not hasattr(distillation.teacher, "mtp")
    for name, gradient in plain.items():
        if name.startswith("mtp."):
            assert gradient.abs().max() > 0
            torch.testing.assert_close(steps[1.0, 0.0][name], gradient, rtol=1e-4, atol=1e-6)
        # KL + MTP; 0.5 KL + 2 LM + MTP; LM + MTP; LM
        expected = 0.5 * steps[1.0, 0.0][name] + 0.5 * gradient + 1.5 * main[name]
        torch.testing.assert_close(steps[0.5, 2.0][name], expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_respects_the_bounds_of_packs(teacher: Path, build: Build) -> None:
    """The divergence over a pack is that over its samples separately, not that over one long text."""
    from nemo_ext.megatron.distillation import OnlineTeacher
    from nemo_ext.megatron.forward_step import forward_step

    student = build(DENSE, "megatron.seq_length=64")
    distillation = OnlineTeacher(config_of(teacher, DENSE))
    distillation.attach([student])
    (whole,) = ({name: tensor[:1] for name, tensor in each.items()} for each in batch())
    cuts = (slice(0, 24), slice(24, 64))
    samples = [{name: tensor[:, cut] for name, tensor in whole.items()} for cut in cuts]
    for sample in samples:
        sample["position_ids"] = torch.arange(sample["tokens"].shape[1])[None]
    positions = torch.cat([sample["position_ids"] for sample in samples], dim=1)
    pack = {**whole, "position_ids": positions, "cu_seqlens": torch.tensor([[0, 24, 64]], dtype=torch.int32)}

    def divergence(row: dict[str, Tensor]) -> Tensor:
        output, loss_function = forward_step(iter([row]), student, distillation=distillation)
        return loss_function(output)[2]["kl to teacher"]

    with torch.no_grad():
        alone = torch.stack([divergence(sample) for sample in samples]).sum(0)
        torch.testing.assert_close(divergence(pack), alone, rtol=1e-4, atol=1e-4)
        assert abs(divergence(whole)[0] - alone[0]) > 1e-2


def test_a_student_equal_to_its_teacher_has_no_gradient(teacher: Path, build: Build) -> None:
    from nemo_ext.megatron.distillation import OnlineTeacher

    student = build("megatron.seq_length=64", "megatron.moe_aux_loss_coeff=0")
    load_weights(student, checkpoints(teacher) / "iter_0000010")
    distillation = OnlineTeacher(config_of(teacher, "distillation.temperature=2"))
    distillation.attach([student])

    found, logged = gradients(student, distillation)

    assert logged["kl to teacher"][0].abs() < 1e-3 and logged["lm loss"][0] > 100
    assert max(gradient.abs().max() for gradient in found.values()) < 1e-4


def test_quantisation_aware_distillation_wins_back_divergence(teacher: Path, build: Build) -> None:
    """From the parent before quantisation; NVFP4 everywhere but in the output layer, on tokens of the training."""
    from nemo_ext.megatron.distillation import OnlineTeacher
    from nemo_ext.megatron.float8_modules import use_float8
    from nemo_ext.megatron.fp8 import Precision

    student = build("megatron.seq_length=64", "megatron.moe_aux_loss_coeff=0")
    load_weights(student, checkpoints(teacher) / "iter_0000010")
    sizes = Architecture.from_config(config_of(teacher))
    plan = Plan.from_config({"default": "nvfp4", "rules": ["head bf16"]})
    use_float8(student, Precision(plan, sizes, aware=True), range(len(sizes.sizes)))
    distillation = OnlineTeacher(config_of(teacher))
    distillation.attach([student])
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)

    divergences = []
    for _ in range(40):
        _, logged = gradients(student, distillation)
        divergences.append(logged["kl to teacher"][0] / 104)
        optimizer.param_groups[0]["lr"] *= 0.95
        for parameter in student.parameters():
            if parameter.grad is not None:
                parameter.grad /= 104
        optimizer.step()

    assert 0 < divergences[-1] < 0.6 * divergences[0]


# Runs


@pytest.mark.slow
def test_a_run_with_an_online_teacher(online: tuple[Path, list[Any]], build: Build) -> None:
    run_dir, lines = online

    assert losses(lines, "kl_to_teacher") == sorted(losses(lines, "kl_to_teacher"), reverse=True)
    assert lines[-1]["kl_to_teacher"] > 0.01 and losses(lines) != losses(lines, "kl_to_teacher")
    assert keys(run_dir) == take_tensors(build(DENSE)).keys(), "the teacher is in the checkpoint"


@pytest.mark.slow
def test_students_with_multi_token_prediction(
    single: Path, saved_logits: Path, train_ranks: Train, tmp_path: Path
) -> None:
    """With a teacher, its files, and both models in a pipeline."""
    words = (*SHORT, DENSE, "model.pattern=*-*-/*-")
    teacher = (f"distillation.teacher={single}", "distillation.top_k=8")
    start = f"megatron.pretrained_checkpoint={checkpoints(tmp_path / 'online')}"
    pipeline = "megatron.pipeline_model_parallel_size=2"

    online = train_ranks(tmp_path / "online", *words, *teacher)
    cached = train_ranks(tmp_path / "cached", *words, f"megatron.logits_load_dir={saved_logits}")
    one = train_ranks(tmp_path / "one", *words, *teacher, start)
    two = train_ranks(tmp_path / "two", *words, *teacher, start, pipeline, ranks=2)

    for name in ("loss", "kl_to_teacher", "mtp_1_loss"):
        assert losses(cached, name) == pytest.approx(losses(online, name), rel=1e-5)
        assert losses(two, name) == pytest.approx(losses(one, name), rel=1e-4)
    assert losses(online, "mtp_1_loss") == sorted(losses(online, "mtp_1_loss"), reverse=True)


@pytest.mark.deep
def test_a_run_resumes_from_its_checkpoint(online: tuple[Path, list[Any]], train_ranks: Train, tmp_path: Path) -> None:
    run_dir, whole = online
    shutil.copytree(checkpoints(run_dir), checkpoints(tmp_path))
    shutil.rmtree(checkpoints(tmp_path) / "iter_0000003")
    (checkpoints(tmp_path) / "latest_checkpointed_iteration.txt").write_text("2")
    teacher = run_directory.read_config(run_dir / run_directory.CONFIG)["distillation"]["teacher"]

    (last,) = train_ranks(tmp_path, *SHORT, DENSE, f"distillation.teacher={teacher}", "distillation.top_k=8")

    for name in ("step", "loss", "kl_to_teacher", "grad_norm"):
        assert last[name] == whole[-1][name]


@pytest.mark.slow
def test_saved_log_probabilities_teach_the_same_as_the_teacher(
    online: tuple[Path, list[Any]], saved_logits: Path, train_ranks: Train, tmp_path: Path
) -> None:
    cached = train_ranks(tmp_path, *SHORT, DENSE, f"megatron.logits_load_dir={saved_logits}")

    _, beside = online
    assert len(cached) == 3
    for name in ("loss", "kl_to_teacher"):
        assert losses(cached, name) == pytest.approx(losses(beside, name), rel=1e-5)
    assert losses(cached, "grad_norm") == pytest.approx(losses(beside, "grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_saving_does_not_train_the_teacher(single: Path, saved_logits: Path, build: Build) -> None:
    """Neither its weights nor its routers' expert bias, which changes without a gradient."""
    before, after = (build("megatron.seq_length=64") for _ in range(2))
    load_weights(before, checkpoints(single) / "iter_0000010")
    load_weights(after, checkpoints(saved_logits.parent) / "iter_0000003")

    expected, got = take_tensors(before), take_tensors(after)
    assert any("expert_bias" in key for key in expected)
    assert all(torch.equal(value, got[key]) for key, value in expected.items())


@pytest.mark.deep
def test_bf16(single: Path, train_ranks: Train, tmp_path: Path) -> None:
    lines = train_ranks(tmp_path, *SHORT, DENSE, "precision=bf16", f"distillation.teacher={single}")

    assert lines[-1]["kl_to_teacher"] < lines[0]["kl_to_teacher"]


# Refusals


def refusal(*overrides: str) -> str:
    """Message of the check for values of the section, set in a config that is composed once."""
    own = [word for word in overrides if "distillation." in word.split("=")[0]]
    others = [word for word in overrides if "distillation." not in word.split("=")[0]]
    config = compose("train", ["run_dir=unused", "data=mock", *others])
    for word in own:
        key, _, value = word.removeprefix("+").removeprefix("distillation.").partition("=")
        assert word.startswith("+") or key in config["distillation"], f"{word}: Hydra knows no such key"
        config["distillation"][key] = math.inf if value == "inf" else yaml.safe_load(value)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (each caller has its own words to find)
        check(config)
    return str(caught.value)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Files of a teacher that a check reads: its config and a checkpoint without weights."""
    run_directory.write_config(tmp_path, compose("train", [f"run_dir={tmp_path}", "data=mock"]))
    (checkpoints(tmp_path) / "iter_0000001").mkdir(parents=True)
    (checkpoints(tmp_path) / "iter_0000001" / ".metadata").touch()
    (checkpoints(tmp_path) / "latest_checkpointed_iteration.txt").write_text("1")
    return tmp_path


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("distillation.kl_weight=-1", "kl_weight=-1"),
        ("distillation.kl_weight=true", "kl_weight=True"),
        ("distillation.kl_weight=0", "kl_weight=0: input should be greater than 0"),
        ("distillation.lm_weight=much", "lm_weight='much'"),
        ("distillation.temperature=0", "temperature=0: input should be greater than 0"),
        ("distillation.temperature=inf", "temperature=inf"),
        ("distillation.top_k=0", "top_k=0: input should be greater than 0"),
        ("distillation.top_k=2.5", "top_k=2.5"),
        ("distillation.teacher=3", "teacher=3"),
        ("distillation.teacher=nowhere", "distillation.teacher=nowhere: no such directory"),
        ("+distillation.temprature=1", "distillation: unknown key 'temprature': did you mean 'temperature'"),
        ("megatron.padded_vocab_size=512", "has 384 vocabulary rows, but the student has 512"),
        ("megatron.logits_load_dir=saved", "cannot be combined, as a run either has one teacher"),
        ("megatron.logits_save_dir=saved", "Megatron rejected the megatron section"),
    ],
)
def test_an_invalid_setting_is_refused(there: Path, override: str, reason: str) -> None:
    assert reason in refusal(f"distillation.teacher={there}", override)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("model.virtual_pipeline_stages=2 megatron.pipeline_model_parallel_size=2", "megatron.logits_load_dir"),
        ("megatron.tensor_model_parallel_size=2", "sequence_parallel=true"),  # the teacher's experts, not the student's
    ],
)
def test_a_layout_that_does_not_fit_the_teacher_is_refused(there: Path, layout: str, reason: str) -> None:
    found = refusal(DENSE, f"distillation.teacher={there}", *layout.split(), "launcher.nproc_per_node=2")

    assert found.startswith("distillation.teacher") and reason in found


def test_saving_with_multi_token_prediction_is_refused(tmp_path: Path) -> None:
    words = ("model.pattern=ME*-/*E", f"megatron.logits_save_dir={tmp_path}", *FROZEN)

    assert "remove the depths from the teacher's pattern" in refusal(*words, "megatron.logits_save_top_k=8")


def test_a_teacher_with_other_tokens_is_refused(there: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own, beside = tmp_path_factory.mktemp("tokenizer"), there / EXTRAS
    beside.mkdir()
    run = compose("train", ["run_dir=unused", "data=mock", f"distillation.teacher={there}"])
    run["megatron"]["tokenizer_model"] = str(own)

    def write(folder: Path, *tokens: str) -> None:
        RustTokenizer(WordLevel(dict(zip(tokens, range(9), strict=False)), "a")).save(str(folder / "tokenizer.json"))

    write(own, "a", "b", "c")
    check_same_tokens(run)  # the teacher's tokens are unknown
    write(beside, "a", "b", "c")
    check_same_tokens(run)
    write(beside, "a", "c", "b", "d")
    with pytest.raises(
        ValueError, match=r"in 3 tokens, such as 'b' with id 2 there and 1 here: tokenize the data"
    ) as caught:
        check_same_tokens(run)
    assert str(own / "tokenizer.json") in str(caught.value) and str(beside / "tokenizer.json") in str(caught.value)


def test_a_checkpoint_without_a_config_is_refused(there: Path) -> None:
    (there / run_directory.CONFIG).unlink()

    assert "has no model config next to it" in refusal(f"distillation.teacher={there}")


def test_unused_settings_are_refused() -> None:
    assert "set distillation.teacher" in refusal("distillation.top_k=4")
    assert "megatron.logits_save_top_k" in refusal("distillation.top_k=4", "megatron.logits_load_dir=saved")


SAVING = ("megatron.logits_save_dir=saved", "megatron.logits_save_top_k=8", *FROZEN)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("megatron.freeze_all_layers=false", "set megatron.freeze_all_layers=true"),
        ("megatron.pipeline_model_parallel_size=2", "requires pipeline_model_parallel_size=1"),
        ("megatron.padded_vocab_size=131200", "131200 rows"),
        ("megatron.eval_iters=1", "set megatron.eval_iters=0"),
        ("megatron.logits_load_dir=saved", "cannot be combined"),
    ],
)
def test_saving_wrong_log_probabilities_is_refused(override: str, reason: str) -> None:
    assert reason in refusal(*SAVING, "launcher.nproc_per_node=2", override)


@pytest.mark.skipif(importlib.util.find_spec("nvidia_resiliency_ext") is not None, reason="its writer is installed")
def test_saving_without_a_writer_is_refused() -> None:
    assert "set megatron.async_strategy=mcore" in refusal(*SAVING, "megatron.async_strategy=nvrx")


def test_files_of_other_sequences_are_refused(tmp_path: Path) -> None:
    run = compose("train", ["run_dir=unused", "data=mock"])["megatron"]
    samples = run["train_iters"] * run["global_batch_size"]
    text = {"identifiers": {"seed": run["seed"], "sequence_length": run["seq_length"], "train_samples": samples}}
    with tarfile.open(tmp_path / "cp0_dp0__3.tar", "w") as archive:
        member = tarfile.TarInfo("_meta.json")
        member.size = len(json.dumps(text))
        archive.addfile(member, io.BytesIO(json.dumps(text).encode()))
    load = f"megatron.logits_load_dir={tmp_path}"

    check(compose("train", ["run_dir=unused", "data=mock", load]))
    assert "megatron.seed was 1234 in the run that saved it, but is 5 here" in refusal(load, "megatron.seed=5")
    assert "from a different data order: train.tokens" in refusal(load, "train.tokens=5120")
    assert "must be a share above 0 and at most 1, not 1.5" in refusal(load, "megatron.logits_load_kd_loss_alpha=1.5")
    assert "logits_load_ignore_errors would" in refusal(load, "megatron.logits_load_ignore_errors=true")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal("megatron.logits_load_dir=nowhere")
    assert "contains no log-probabilities" in refusal(f"megatron.logits_load_dir={tmp_path}")
    (tmp_path / "cp0_dp0__3.tar").write_bytes(b"half a file")
    assert "cannot be read" in refusal(f"megatron.logits_load_dir={tmp_path}")


@pytest.mark.deep
def test_the_commands_of_the_docs(
    launched: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "distillation.md"
    lines = [line for block in re.findall(r"```shell\n(.*?)```", page.read_text(), re.S) for line in block.splitlines()]
    short = ("data=mock", "train.tokens=512", "train.warmup_tokens=0", *SMALL_BATCHES)
    monkeypatch.chdir(tmp_path)

    for line in lines:
        launched(*shlex.split(line)[1:], *short)

    assert len(lines) == 4
    for name in ("student", "cached"):
        (step,) = (
            line for line in run_directory.read_metrics(tmp_path / "runs" / name / "metrics.jsonl") if "lr" in line
        )
        assert step["kl_to_teacher"] > 0
