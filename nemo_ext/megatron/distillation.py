"""Knowledge distillation: a student learns a teacher's logits inside Megatron's own trainer.

The teacher runs in the student's process (`distillation.teacher`), or its log-probabilities were saved beforehand
(`megatron.logits_load_dir`). Either way, the divergence is computed where the student computes its LM loss, before that
loss overwrites the logits: Megatron's cross entropy works in place in float32, Transformer Engine's in any dtype.
"""

import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.checkpoint.beside import config_beside, extras_beside, is_hugging_face
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.data.text.tokenizers import read_tokenizer
from nemo_ext.job.settings import STRICT, checked
from nemo_ext.megatron.arguments import command_line, megatron_parser, parse_arguments, pattern_with_cuts, world_size
from nemo_ext.megatron.divergence import kl_divergence

KL = "kl to teacher"
"""Name of the divergence in Megatron's log and in TensorBoard; metrics.jsonl calls it `kl_to_teacher`."""

CACHED_VOCABULARY = 2**17
"""Largest vocabulary for which Megatron can save log-probabilities (training/distillation/logits_saver.py)."""

MODEL_GROUPS = ("transformer configuration", "network size", "moe", "mla", "experimental_attention_variant")
"""Argument groups of Megatron's parser whose flags define a model."""

PRECISION = ("fp8", "fp4", "first_last_layers_bf16", "num_layers_at_")
"""Prefixes of the model flags that the teacher takes from the student's run."""

TRAINING_ONLY = ("recompute_", "moe_layer_recompute", "distribute_saved", "cpu_offloading", "offload_", "fine_grained_")
"""Prefixes of the model flags that a model without a backward pass does not need."""


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """The `distillation` section of a training config; without a teacher, all values must be the defaults.

    Attributes:
        teacher: path of a run directory or Megatron checkpoint.
        kl_weight: weight of the divergence in the loss.
        lm_weight: weight of the language modelling loss.
        temperature: divisor of both models' logits; the divergence is multiplied by its square.
        top_k: number of the teacher's most probable tokens that are distinguished; None for all.
    """

    teacher: Annotated[str, Field(min_length=1)] | None = None
    kl_weight: Positive = 1.0
    lm_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    temperature: Positive = 1.0
    top_k: PositiveInt | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """Read the settings from a composed config; return the defaults if it has no such section.

        Raises:
            ValueError: a value is invalid, or has no effect because there is no teacher.
        """
        settings = checked(cls, config.get("distillation") or {}, "distillation", strict=True)
        changed = [field.name for field in fields(cls) if getattr(settings, field.name) != field.default]
        if settings.teacher is None and changed:
            cached = config["megatron"].get("logits_load_dir") is not None
            advice = (
                "for saved log-probabilities set megatron.logits_load_kd_loss_alpha, and megatron.logits_save_top_k in "
                "the teacher's run"
                if cached
                else "set distillation.teacher, or remove it"
            )
            raise ValueError(f"distillation.{changed[0]} has no effect without a teacher in this run: {advice}")
        return settings


def teacher_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Return the teacher's training config for a student's run, and the folder of its checkpoint.

    The config next to the checkpoint defines the model; layout, precision and the rest come from the run.

    Raises:
        ValueError: the checkpoint or its config does not exist, or its vocabulary size differs from the student's.
    """
    teacher = str(config["distillation"]["teacher"])
    source = Path(teacher)
    if not source.exists():
        raise ValueError(f"distillation.teacher={teacher}: no such directory; set it to a run directory or checkpoint")
    if is_hugging_face(source):
        raise ValueError(
            f"distillation.teacher={teacher} is a Hugging Face checkpoint: convert it first (`nemo-ext convert`)"
        )
    folder = checkpoint_folder(source)
    model = config_beside(source, folder)
    if model is None or "model" not in model or "megatron" not in model:
        raise ValueError(
            f"distillation.teacher={teacher} has no model config next to it; expected the run's config.yaml "
            "or a converted checkpoint's model/NAME.yaml"
        )
    return with_model_of(config, model), folder


def check_same_tokens(config: Mapping[str, Any]) -> None:
    """Reject a teacher whose tokenizer differs from that of the run's data, if both tokenizers' files are available.

    Raises:
        ValueError: the tokenizers differ; the message names a token whose ids differ.
    """
    source = Path(str(config["distillation"]["teacher"]))
    folder = checkpoint_folder(source)
    beside = config_beside(source, folder) or {}
    theirs = [extras_beside(source, folder), (beside.get("megatron") or {}).get("tokenizer_model")]
    student = _tokenizer_file(config["megatron"].get("tokenizer_model"))
    teacher = next(filter(None, map(_tokenizer_file, theirs)), None)
    if student is None or teacher is None:
        return
    # Special tokens may have other names for the same ids.
    ours, others = (read_tokenizer(file)[0].get_vocab(with_added_tokens=False) for file in (student, teacher))
    differ = sorted(ours.items() ^ others.items(), key=lambda item: (item[1], item[0]))
    if differ:
        token = differ[0][0]
        raise ValueError(
            f"the tokenizer of distillation.teacher={source} ({teacher}) differs from the data's ({student}) in "
            f"{len({name for name, _ in differ})} tokens, such as {token!r} with id {others.get(token, 'none')} there "
            f"and {ours.get(token, 'none')} here: tokenize the data with the teacher's tokenizer, or convert the "
            "student with tokenizer=FOLDER"
        )


def _tokenizer_file(place: object) -> Path | None:
    """Return a tokenizer's JSON file, where `place` is its folder or the file itself; None if it does not exist."""
    if place is None:
        return None
    path = Path(str(place)).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    return path if path.is_file() and path.suffix == ".json" else None


def one_stage_a_rank(config: Mapping[str, Any]) -> None:
    """Reject interleaved pipeline stages, which a run with a teacher does not support.

    Raises:
        ValueError: a pipeline rank has several stages.
    """
    stages = len(parse(pattern_with_cuts(config)).cuts) + 1
    if stages > (ranks := int(config["megatron"].get("pipeline_model_parallel_size") or 1)):
        raise ValueError(
            f"distillation.teacher with {stages} stages on {ranks} pipeline ranks: Megatron's interleaved schedule "
            "sends activations of one model only; give every rank one stage, or save the teacher's log-probabilities "
            "first and train with megatron.logits_load_dir (docs/distillation.md)"
        )


def with_model_of(config: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that builds the teacher in the student's run: the student's, but with the teacher's model.

    Args:
        config: the student's composed config.
        teacher: the teacher's training config.

    Raises:
        ValueError: the two vocabularies differ in size.
    """
    rows, student_rows = (Architecture.from_config(model).vocab_size for model in (teacher, config))
    if rows != student_rows:
        raise ValueError(
            f"distillation.teacher={config['distillation']['teacher']} has {rows} vocabulary rows, but the student has "
            f"{student_rows}: use the same tokenizer and the same megatron.padded_vocab_size for both"
        )
    run, model_names = config["megatron"], model_flags()
    flags = {name: value for name, value in run.items() if name not in model_names}
    flags |= {name: value for name, value in teacher["megatron"].items() if name in model_names and value is not None}
    flags["padded_vocab_size"] = rows
    # Megatron's parser requires at least the sequence length, even for a model without a limit.
    flags["max_position_embeddings"] = max(flags.get("max_position_embeddings") or 0, run["seq_length"])
    if not flags.get("num_experts"):
        flags = {name: value for name, value in flags.items() if not name.startswith("expert_")}
    # Without the cuts of its training, and without multi-token prediction.
    pattern = format_pattern(Pattern(parse(teacher["model"]["pattern"]).blocks))
    flags = {name: value for name, value in flags.items() if not name.startswith("mtp_")}
    section = {**teacher["model"], "pattern": pattern, "backend": config["model"].get("backend") or "auto"}
    section.pop("virtual_pipeline_stages", None)
    return {**config, "model": section, "megatron": flags, "distillation": None}


@cache
def model_flags() -> frozenset[str]:
    """Return the names of Megatron's flags that define a model, spelled as in the `megatron` section."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    layout = {field.name for field in fields(ModelParallelConfig)}
    names = {
        option.removeprefix("--").replace("-", "_")
        for group in megatron_parser()._action_groups
        if group.title in MODEL_GROUPS
        for action in group._group_actions
        if action.dest not in layout
        for option in action.option_strings
    }
    training_only = {name for name in names if "cuda_graph" in name or name.startswith(TRAINING_ONLY)}
    return frozenset(name for name in names if not name.startswith(PRECISION)) - training_only | {"padded_vocab_size"}


class Distillation(ABC):
    """Divergence of a student from its teacher in each micro-batch, and the weights of that loss and the LM loss."""

    def __init__(self, *, kl_weight: float, lm_weight: float) -> None:
        self.kl_weight, self.lm_weight = kl_weight, lm_weight
        self._divergence: Tensor | None = None
        self._labels: Tensor | None = None

    def attach(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Make the last stage compute the divergence whenever it computes its LM loss; return the model's stages.

        Multi-token prediction computes the loss of each depth with the same function, but with shifted labels.
        """
        from megatron.core.utils import unwrap_model

        student = unwrap_model(model)[-1]
        if not student.post_process:
            return model
        language_model_loss = student.compute_language_model_loss

        def both(labels: Tensor, logits: Tensor) -> Tensor:
            if labels is not self._labels:
                return language_model_loss(labels, logits)
            self._divergence = self.divergence(logits, training=student.training)
            return language_model_loss(labels, logits if self.lm_weight else logits.detach())

        student.compute_language_model_loss = both
        return model

    def before_student(self, batch: Mapping[str, Tensor], bounds: Mapping[str, Any]) -> None:
        """Prepare for the student's forward pass on a micro-batch.

        Args:
            batch: the micro-batch's tensors `[batch, seq]`, keyed by name (`tokens`, `labels`, ...).
            bounds: the model's keyword argument `packed_seq_params` for a pack; empty for other data.
        """
        self._labels = batch["labels"]

    def after_student(self, output: Tensor) -> Tensor:
        """Return the output that this stage sends on, given the student's output."""
        return output

    @abstractmethod
    def divergence(self, logits: Tensor, *, training: bool) -> Tensor | None:
        """Compute KL(teacher || student) per token `[batch, seq]` in nats; None if the teacher's output is missing.

        Args:
            logits: the student's logits, `[seq, batch, vocabulary / tensor parallel size]`; not modified.
            training: False during evaluation.
        """

    def take(self) -> Tensor | None:
        """Return and forget the last forward pass's divergence `[batch, seq]`; None on stages without output layer."""
        divergence, self._divergence = self._divergence, None
        return divergence

    def loss(self, lm: Tensor, kl: Tensor) -> Tensor:
        """Return the weighted sum of the LM loss and the divergence, both given as sums (or means) over tokens."""
        return self.kl_weight * kl + (self.lm_weight * lm if self.lm_weight else 0.0)


class OnlineTeacher(Distillation):
    """Teacher in the student's process and layout, which has no gradients and is not saved in checkpoints.

    In a pipeline, both models run stage by stage, each with its own cuts, and stages send both models' activations as
    one tensor `[seq, batch, student hidden + teacher hidden]`.

    Args:
        config: the student's composed config.
        load: function that builds the teacher from `config`; `load_teacher` by default.
    """

    def __init__(
        self, config: Mapping[str, Any], load: Callable[[Mapping[str, Any]], torch.nn.Module] | None = None
    ) -> None:
        settings = Settings.from_config(config)
        super().__init__(kl_weight=settings.kl_weight, lm_weight=settings.lm_weight)
        self.config, self.settings, self.load = config, settings, load or load_teacher
        self.teacher: Any = None
        self._output: Tensor | None = None

    def attach(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Load the teacher, then attach the divergence to the student (see `Distillation.attach`)."""
        from megatron.core.utils import unwrap_model

        self.teacher = self.load(self.config)
        (student,) = unwrap_model(model)
        if not student.pre_process:
            self._divide_input(student)
        return super().attach(model)

    def _divide_input(self, student: Any) -> None:
        """Make a later stage of the student split its input and pass the teacher's part on to the teacher."""
        take, width = student.set_input_tensor, student.config.hidden_size

        def divided(inputs: Any) -> None:
            (both,) = inputs if isinstance(inputs, list) else (inputs,)
            take(both[..., :width].contiguous())
            self.teacher.set_input_tensor(both[..., width:].detach().contiguous())

        student.set_input_tensor = divided

    def schedule(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's pipeline schedule `run`, so that tensors sent between stages also hold the teacher's part."""

        def wider(*shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], ...]:
            more = int(self.teacher.config.hidden_size)
            return tuple([shape and (*shape[:-1], shape[-1] + more) for shape in group] for group in shapes)

        def scheduled(**named: Any) -> Any:
            return run(**{**named, "adjust_tensor_shapes_fn": wider})

        return scheduled

    def before_student(self, batch: Mapping[str, Tensor], bounds: Mapping[str, Any]) -> None:
        """Run the teacher's stage on the micro-batch, and store its logits, or its activations for the next stage."""
        super().before_student(batch, bounds)
        with torch.no_grad():
            self._output = self.teacher(batch["tokens"], batch["position_ids"], None, **bounds)

    def after_student(self, output: Tensor) -> Tensor:
        """Append the teacher's activations to the student's output, except on the last stage."""
        if self._output is None:
            return output
        teacher, self._output = self._output, None
        return torch.cat([output, teacher.to(output.dtype)], dim=-1)

    def divergence(self, logits: Tensor, *, training: bool) -> Tensor:
        """Compute the divergence (see `Distillation.divergence`), also during evaluation."""
        from megatron.core import parallel_state

        assert self._output is not None
        teacher, self._output = self._output.transpose(0, 1), None
        group = parallel_state.get_tensor_model_parallel_group()
        kl = kl_divergence(
            logits, teacher, temperature=self.settings.temperature, top_k=self.settings.top_k, group=group
        )
        return kl.transpose(0, 1).contiguous()


class CachedTeacher(Distillation):
    """A teacher's saved log-probabilities, read by Megatron's own loader.

    Args:
        arguments: Megatron's arguments; their `logits_load_dir` is set to None. Megatron would otherwise keep the
            output layer's logits, which the LM loss has overwritten in float32 by the time they are read, and
            require that layer on every pipeline stage.
    """

    def __init__(self, arguments: Any) -> None:
        alpha = arguments.logits_load_kd_loss_alpha
        super().__init__(kl_weight=alpha, lm_weight=1 - alpha)
        self.options = {
            "logprobs_dir": arguments.logits_load_dir,
            "decode_threads": arguments.logits_load_decode_threads,
            "prefetch_factor": arguments.logits_load_prefetch_factor,
            "msc_prefetch_depth": arguments.logits_load_msc_prefetch_depth,
        }
        arguments.logits_load_dir = None
        self._saved: Any = None

    def divergence(self, logits: Tensor, *, training: bool) -> Tensor | None:
        """Compute the divergence (see `Distillation.divergence`); None in evaluations, for which nothing is saved."""
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
        from megatron.training.distillation.cached_logits_loss import CachedLogitsKDLoss

        if not training:
            return None
        if self._saved is None:
            self._saved = CachedLogitsKDLoss(**self.options)  # only now: it needs the process groups
        # Upstream works in float32 and in place, so float32 logits are copied.
        copied = logits.clone() if logits.dtype is torch.float32 else logits
        return reduce_from_tensor_model_parallel_region(self._saved(copied))


def from_config(config: Mapping[str, Any], arguments: Any) -> Distillation | None:
    """Return a run's distillation, or None if it has no teacher.

    Args:
        config: the composed config.
        arguments: Megatron's validated arguments for it, which `CachedTeacher` changes.
    """
    if getattr(arguments, "logits_load_dir", None) is not None:  # not in every version
        return CachedTeacher(arguments)
    return OnlineTeacher(config) if Settings.from_config(config).teacher is not None else None


def load_teacher(config: Mapping[str, Any]) -> torch.nn.Module:
    """Build this rank's part of the teacher in a student's run, and load its weights."""
    from megatron.core import dist_checkpointing
    from megatron.training.utils import print_rank_0

    merged, folder = teacher_config(config)
    print_rank_0(f"teacher: {folder}")
    teacher = build_teacher(merged)
    state = dist_checkpointing.load({"model": teacher.sharded_state_dict()}, str(folder))
    teacher.load_state_dict(state["model"])
    return teacher


def build_teacher(merged: Mapping[str, Any]) -> Any:
    """Build this rank's part of a teacher, without gradients, from the config that `with_model_of` returns."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model

    from nemo_ext.megatron.model import BlockModelBuilder, model_config

    arguments = parse_arguments(command_line(merged), world_size=world_size(merged))
    config = model_config(merged["model"], pattern_with_cuts(merged), arguments)
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # In the run's precision, as Megatron builds any model. Megatron's wrappers would only turn logits into float32.
    (teacher,) = unwrap_model(BlockModelBuilder(config).build_distributed_models(groups, wrap_with_ddp=False))
    return teacher.eval().requires_grad_(False)


def saved_by(folder: Path) -> dict[str, Any]:
    """Read Megatron's record of the run that saved log-probabilities: `seed`, `sequence_length`, `train_samples`, ...

    Raises:
        ValueError: the folder holds no saved log-probabilities, or they cannot be read.
    """
    files = sorted(folder.glob("cp*_dp*__*.tar"))
    if not files:
        raise ValueError(
            f"megatron.logits_load_dir={folder} contains no log-probabilities (cp0_dp0__STEP.tar): save them first "
            "with megatron.logits_save_dir"
        )
    try:
        with tarfile.open(files[0]) as archive:
            member = archive.next()
            stream = archive.extractfile(member) if member is not None else None
            assert stream is not None
            identifiers: dict[str, Any] = json.load(stream)["identifiers"]
    except (OSError, tarfile.TarError, ValueError, KeyError, AssertionError) as error:
        raise ValueError(f"{files[0]} cannot be read ({error}): save the log-probabilities again") from error
    return identifiers
