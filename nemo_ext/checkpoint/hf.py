"""Conversion of checkpoints between Hugging Face and Megatron, tensor by tensor, in one process without a GPU.

    source -> model description -> tensor mapping (formats/) -> shards -> folder, renamed at the end

Both directions are exact: no value changes unless `dtype` requests another type.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint.beside import (
    EXTRAS,
    config_beside,
    copy_extras,
    extra_files,
    extras_beside,
    is_hugging_face,
    keep_extras,
    kept_keys,
    read_json,
    write_model_file,
)
from nemo_ext.checkpoint.description import Description, differences, from_config, megatron_arguments, to_config
from nemo_ext.checkpoint.formats import Entry, Format, choose, ignored, read
from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.retokenize import TOKENIZER, NewRows, Retokenized, Vocabulary, replace_files, vocabulary
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError, check_tensors, files_identity, fingerprint, torch_dtype
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.checkpoint.writing import (
    HUGGING_FACE,
    MEGATRON,
    Slot,
    Work,
    already_made,
    cut_into_parts,
    write_checkpoint,
)
from nemo_ext.data.text import byte_tokenizer
from nemo_ext.data.text.tokenizers import ByteTokenizer
from nemo_ext.data.training import data_sections
from nemo_ext.job.progress import notice

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SHARD = 5.0
LONGEST = "max_position_embeddings"
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's names for the weights of the embedding and the output layer."""
PADDED = 128
"""Multiple to which Megatron pads the vocabulary (its `make_vocab_size_divisible_by`)."""
PREDICTION_KEYS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
"""Keys of config.json that only models with multi-token prediction have."""
ROPE_KEYS = ("rotary_base", "rotary_percent", "rotary_scaling_factor", "rope_scaling_factor", "use_rope_scaling")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """User settings of a conversion, described in hydra_conf/convert.yaml."""

    architecture: str | None = None
    dtype: str | None = None
    shard_gigabytes: float = DEFAULT_SHARD
    files_from: Path | None = None
    change_rope: bool = False
    check_finite: bool = True
    verify: bool = True
    iteration: int | None = None
    to_format: str | None = None
    tokenizer: Path | None = None
    old_tokenizer: Path | None = None
    new_rows: NewRows = "pieces"
    mtp: Literal["keep", "drop"] = "keep"
    template: str | None = None

    def __post_init__(self) -> None:
        if self.template is not None:
            Template.load(self.template)
        for key in ("tokenizer", "old_tokenizer"):
            folder = getattr(self, key)
            if folder is not None and not (folder / TOKENIZER).is_file():
                raise ValueError(f"{key}={folder}: expected a folder with a {TOKENIZER}")
        if self.tokenizer is None and (self.old_tokenizer is not None or self.new_rows != "pieces"):
            raise ValueError(
                "old_tokenizer and new_rows have no effect without tokenizer=FOLDER: set tokenizer, or remove both"
            )
        if self.dtype is not None:
            torch_dtype(self.dtype)
        if self.to_format not in (None, HUGGING_FACE, MEGATRON):
            raise ValueError(f"to_format={self.to_format!r}: expected {HUGGING_FACE} or {MEGATRON}")
        if not self.shard_gigabytes > 0:
            raise ValueError(f"shard_gigabytes={self.shard_gigabytes:g}: expected a positive number")
        if self.files_from is not None and not self.files_from.is_dir():
            raise ValueError(f"files_from={self.files_from}: expected an existing folder")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked conversion that has not written anything yet.

    Attributes:
        reader: reader of the source checkpoint.
        to: target folder.
        to_format: format to write, `huggingface` or `megatron`.
        format: Hugging Face format of the source or the target.
        config: content of config.json; empty for a Megatron target.
        work: work items, one per row of the tensor mapping.
        extras: folder whose tokenizer and other files are copied; None if there is none.
        tokenizer: folder of another tokenizer, whose files replace the tokenizer files of `extras`; None keeps them.
        remarks: notes for the user.
        of_bytes: whether the model was trained on bytes, so that a byte tokenizer is written.
    """

    reader: SafetensorsReader | TorchDistReader | Retokenized
    to: Path
    to_format: str
    description: Description
    format: Format
    config: Mapping[str, Any]
    work: Sequence[Work]
    extras: Path | None
    remarks: Sequence[str]
    tokenizer: Path | None = None
    of_bytes: bool = False

    @property
    def bytes(self) -> int:
        """Total size of the target's tensors in bytes."""
        return sum(work.bytes for work in self.work)


def plan(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None = None) -> Plan:
    """Open the source, identify its model and plan the target; nothing is written.

    Args:
        source: Hugging Face folder, or Megatron run directory, checkpoints directory or checkpoint.
        config: sections `model` and `megatron`. With a `model.pattern`, they define the complete model and must match
            the checkpoint. Without one, they override single keys of the checkpoint's config. None overrides nothing.

    Raises:
        ValueError: the checkpoint is corrupt or does not match the model config, or no format can express the model.
    """
    if not source.exists():
        raise CheckpointError(f"from={source}: expected the folder of an existing checkpoint or run")
    if to.resolve() == source.resolve():
        raise CheckpointError(f"to={to} is also the source (from): choose another folder")
    if is_hugging_face(source):
        return _plan_from_hf(source, to, settings, config)
    return _plan_from_megatron(source, to, settings, config)


def _plan_from_hf(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None) -> Plan:
    if settings.iteration is not None:
        raise ValueError(
            f"iteration={settings.iteration} applies to Megatron runs only, and {source} is a Hugging Face folder: "
            "remove iteration"
        )
    whole = SafetensorsReader(source)
    config_json = read_json(source / CONFIG)
    hf_format, description = read(config_json)
    hf_format = hf_format.as_named(whole.tensors)
    off = ignored(config_json)
    remarks = [f"config.json: ignored unknown keys that are switched off: {', '.join(off)}"] if off else []
    remarks += [f"ignored files that are not weights of this model: {', '.join(whole.unread)}"] if whole.unread else []
    description, dropped, more = _with_prediction(description, whole, settings)
    remarks += more
    requested = _with_changes(to_config(description), config)
    if requested is not None:
        description = _agreed(description, from_config(requested), settings)
    expected = {n: s for e in hf_format.entries(description) for n, s in zip(e.names, e.shapes, strict=True)}
    check_tensors(whole, expected, ignored=[*dropped, *_harmless(whole, description, hf_format)])
    extras = settings.files_from or source
    tables = [f"{hf_format.outside[role]}.weight" for role in ("embedding", "head")]
    pad = settings.to_format != HUGGING_FACE
    reader, description, more = _with_tokenizer(whole, tables, description, settings, beside=extras, pad=pad)
    remarks += more
    entries = list(hf_format.entries(description))
    if settings.to_format == HUGGING_FACE:
        target = _plan_to_hf(reader, entries, to, settings, description, extras)
        return replace(target, remarks=[*remarks, *target.remarks])
    if settings.architecture is not None:
        raise ValueError(
            f"architecture={settings.architecture} applies to Hugging Face targets only: remove it, or set "
            "to_format=huggingface"
        )
    return Plan(
        reader=reader,
        to=to,
        to_format=MEGATRON,
        description=description,
        format=hf_format,
        config={},
        work=[_work(reader, entry, entry.pieces, settings) for entry in entries],
        extras=extras,
        tokenizer=settings.tokenizer,
        remarks=[*remarks, *_padding(description)],
    )


def _plan_from_megatron(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None) -> Plan:
    folder = checkpoint_folder(source, settings.iteration)
    if settings.iteration is not None and folder.name != f"iter_{settings.iteration:07d}":
        raise ValueError(
            f"iteration={settings.iteration} requires a run, but {source} is a single checkpoint: remove iteration"
        )
    whole = TorchDistReader(folder)
    if settings.to_format == MEGATRON:
        raise ValueError("to_format=megatron, but the source is already a Megatron checkpoint: remove to_format")
    beside = config_beside(source, folder)
    requested = _with_changes(beside, config)
    if beside is None and requested is None:
        raise CheckpointError(
            f"{source} has no config.yaml and no model/*.yaml next to it: name the model with model=NAME"
        )
    description = from_config(beside or requested or {})
    description, dropped, notes = _with_prediction(description, whole, settings)
    if beside is not None and requested is not None:
        description = _agreed(description, from_config(requested), settings)
    entries = list(choose(description, settings.architecture)[0].entries(description))
    check_tensors(whole, {piece.key: piece.whole for entry in entries for piece in entry.pieces}, ignored=dropped)
    extras = settings.files_from or extras_beside(source, folder)
    reader, description, remarks = _with_tokenizer(whole, TABLES, description, settings, beside=extras, pad=False)
    if remarks:
        entries = list(choose(description, settings.architecture)[0].entries(description))
    named = next((found for data in data_sections(beside or {}) if (found := data.get("tokenizer"))), None)
    target = _plan_to_hf(reader, entries, to, settings, description, extras, named)
    return replace(target, remarks=[*notes, *remarks, *target.remarks])


def _with_prediction(
    description: Description, reader: SafetensorsReader | TorchDistReader, settings: Settings
) -> tuple[Description, list[str], list[str]]:
    """Drop multi-token prediction if `mtp=drop` is set.

    Returns:
        Description of the model to convert, names of the dropped tensors, and remarks for the user.
    """
    dropped = [name for name in reader.tensors if name.startswith("mtp.")]
    if settings.mtp == "keep":
        if description.prediction and not dropped:
            raise CheckpointError(
                f"{reader.path}: the model's config has multi-token prediction, but the checkpoint has no tensors "
                "mtp.*: set mtp=drop to omit it"
            )
        if dropped and not description.prediction:
            raise CheckpointError(
                f"{reader.path}: the checkpoint has {len(dropped)} mtp.* tensors, but the model's config has no "
                "multi-token prediction: correct the config, or set mtp=drop to omit them"
            )
        return description, [], []
    return description.without_prediction(), dropped, [f"mtp=drop: {len(dropped)} tensors are not converted"]


def _with_tokenizer(
    reader: SafetensorsReader | TorchDistReader,
    tables: Sequence[str],
    description: Description,
    settings: Settings,
    *,
    beside: Path | None,
    pad: bool,
) -> tuple[SafetensorsReader | TorchDistReader | Retokenized, Description, list[str]]:
    """Convert a checkpoint and its description to the vocabulary of `settings.tokenizer`, if that is set.

    Args:
        tables: names of the embedding and output layer weights.
        beside: folder with the checkpoint's tokenizer, if any.
        pad: whether to pad the vocabulary to a multiple of `PADDED`, as Megatron does.

    Returns:
        Reader, description, and remarks for the user; the arguments and no remarks if no tokenizer is set.
    """
    if settings.tokenizer is None:
        return reader, description, []
    old = settings.old_tokenizer or beside
    if old is None or not (old / TOKENIZER).is_file():
        raise ValueError(
            f"tokenizer={settings.tokenizer} requires the checkpoint's own tokenizer, which is not in its folder: set "
            "old_tokenizer=FOLDER"
        )
    new = vocabulary(old, settings.tokenizer, rows=description.vocab_size, new_rows=settings.new_rows)
    rows = -(-new.size // PADDED) * PADDED if pad else new.size
    architecture = replace(description.architecture, vocab_size=rows)
    changed = replace(description, vocab_size=new.size, architecture=architecture)
    return Retokenized(reader, tables, new), changed, [new.summary()]


def _harmless(reader: SafetensorsReader, description: Description, hf_format: Format) -> list[str]:
    """Names of redundant tensors in older checkpoints: RoPE frequencies, and an output layer equal to the embedding."""
    names = [name for name in reader.tensors if name.endswith(".rotary_emb.inv_freq")]
    head, table = (f"{hf_format.outside[role]}.weight" for role in ("head", "embedding"))
    if description.architecture.tied_embeddings and {head, table} <= reader.tensors.keys():
        import torch

        if torch.equal(reader.read(head), reader.read(table)):
            names.append(head)
    return names


def _with_changes(beside: Mapping[str, Any] | None, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Determine the model config to use in place of the checkpoint's own.

    Args:
        beside: config found next to the checkpoint, if any.
        config: sections `model` and `megatron` requested by the user, if any.

    Returns:
        `config` if it has a `model.pattern`; otherwise `beside` with the keys of `config` overridden; None if
        `config` has no keys.
    """
    overrides = {name: dict((config or {}).get(name) or {}) for name in ("model", "megatron")}
    overrides["model"] = {key: value for key, value in overrides["model"].items() if value is not None}
    if overrides["model"].get("pattern"):
        return overrides
    if not any(overrides.values()):
        return None
    if beside is None:
        raise CheckpointError(
            "no config.yaml or model/*.yaml is next to the checkpoint (from), so single keys cannot be overridden: "
            "name the model with model=NAME"
        )
    changed = {name: {**beside[name], **overrides[name]} for name in overrides}
    for name, keys in overrides.items():
        check_effect(changed, name, keys)
    return changed


def check_effect(config: Mapping[str, Mapping[str, Any]], section: str, keys: Mapping[str, Any]) -> None:
    """Reject config keys that have no effect on the model in a checkpoint.

    Args:
        config: sections `model` and `megatron`, including the keys to check.
        section: section that contains the keys.
        keys: mapping whose keys are checked; its values are not used.

    Raises:
        ValueError: a key has no effect; names the nearest key that does.
    """
    whole = from_config(config)
    known = to_config(whole)[section]
    for key in keys:
        without = {**config, section: {name: value for name, value in config[section].items() if name != key}}
        if key in known or key in ("name", "family", "backend"):
            continue
        try:
            same = from_config(without) == whole
        except ValueError:
            continue
        if same:
            near = difflib.get_close_matches(key, {*known, *ROPE_KEYS}, n=1)
            hint = f"; did you mean {section}.{near[0]}?" if near else ""
            raise ValueError(f"{section}.{key} has no effect on the model in a checkpoint: remove it{hint}")


def _plan_to_hf(
    reader: SafetensorsReader | TorchDistReader | Retokenized,
    entries: Sequence[Entry],
    to: Path,
    settings: Settings,
    description: Description,
    extras: Path | None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Plan:
    hf_format, config = choose(description, settings.architecture)
    targets = list(hf_format.entries(description))
    if [entry.pieces for entry in targets] != [entry.pieces for entry in entries]:
        raise ValueError(
            f"{hf_format.architecture} stores experts differently than the source: convert the source to Megatron "
            "first, and then the result to this architecture"
        )
    pairs = zip(entries, targets, strict=True)
    work = [_work(reader, entry, _named(target), settings, to=target) for entry, target in pairs]
    kept = kept_keys(extras, hf_format)
    if not description.prediction:
        kept = {key: value for key, value in kept.items() if key not in PREDICTION_KEYS}
    of_bytes = extras is None and tokenizer == {"kind": "byte"}
    if of_bytes:
        kept["eos_token_id"] = ByteTokenizer.eod
    if isinstance(reader, Retokenized):
        kept |= reader.rows.new_ids(kept)
    config = {**kept, **config, "dtype": _main_type(work)}
    config["torch_dtype"] = config["dtype"]  # the name before transformers 4.56
    # A run on shorter sequences than the model supports does not reduce its context length.
    rope = description.rope
    scaled = int(rope.factor * rope.original_positions) if rope is not None and rope.scaling == "yarn" else 0
    config[LONGEST] = max(config[LONGEST], int(kept.get(LONGEST) or 0), scaled)
    left_out = 0 if isinstance(reader, SafetensorsReader) else reader.left_out
    remarks = [*hf_format.remarks(description), *_padding(description)]
    if scaled and config[LONGEST] != scaled:
        remarks.append(
            f"transformers 4 derives YaRN's factor from {LONGEST}={config[LONGEST]}, but rope_scaling implies "
            f"{scaled}: load it with transformers 5 or vLLM"
        )
    if left_out:
        remarks.append(f"{left_out} optimizer state tensors are dropped: the Hugging Face format cannot hold them")
    if extras is None and not of_bytes:
        tokenised = f"; the data were tokenised with {tokenizer['path']}" if tokenizer and "path" in tokenizer else ""
        remarks.append(
            f"no tokenizer is written: files_from=FOLDER adds one, with generation config and chat template{tokenised}"
        )
    return Plan(
        reader=reader,
        to=to,
        to_format=HUGGING_FACE,
        description=description,
        format=hf_format,
        config=config,
        work=work,
        extras=extras,
        tokenizer=settings.tokenizer,
        remarks=remarks,
        of_bytes=of_bytes,
    )


def _main_type(work: Sequence[Work]) -> str:
    """Name of the dtype that accounts for the most bytes of the target."""
    bytes_of: dict[str, int] = {}
    for slot in (slot for item in work for slot in item.slots):
        bytes_of[slot.dtype] = bytes_of.get(slot.dtype, 0) + slot.bytes
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])


def _agreed(checkpoint: Description, requested: Description, settings: Settings) -> Description:
    """Check that the checkpoint holds the requested model, up to RoPE settings if `settings.change_rope` is true.

    Returns:
        The requested description, with the checkpoint's Hugging Face layer numbers if it has none of its own.
    """
    if settings.mtp == "drop":
        requested = requested.without_prediction()
    different = differences(checkpoint, requested)
    rope = [name for name in different if name.startswith("rope.")]
    if settings.change_rope:
        for name in rope:
            notice(f"RoPE changes: {different.pop(name)}")
    if different:
        hint = "" if settings.change_rope or not rope else "; change_rope=true accepts its RoPE settings"
        lines = "".join(f"\n  {line}" for line in different.values())
        raise CheckpointError(
            f"the checkpoint does not match the model config:{lines}\nchoose the matching model=NAME{hint}"
        )
    if requested.hf_layers is not None:
        return requested
    return replace(requested, hf_layers=checkpoint.hf_layers, hf_layer_count=checkpoint.hf_layer_count)


def _padding(description: Description) -> list[str]:
    padding = description.architecture.vocab_size - description.vocab_size
    return [f"{padding} vocabulary rows are padding: only Megatron has them, and new ones are zero"] if padding else []


def _named(entry: Entry) -> tuple[Piece, ...]:
    return tuple(Piece.from_shape(name, *shape) for name, shape in zip(entry.names, entry.shapes, strict=True))


def _work(
    reader: SafetensorsReader | TorchDistReader | Retokenized,
    source: Entry,
    pieces: tuple[Piece, ...],
    settings: Settings,
    *,
    to: Entry | None = None,
) -> Work:
    """Create the work item for one row of the tensor mapping.

    Args:
        pieces: tensors of the target to write, or slices of them.
        settings: settings of the conversion, which may specify a dtype.
        to: row of the Hugging Face target's mapping; None for a Megatron target.
    """
    from_hf = isinstance(reader.reader if isinstance(reader, Retokenized) else reader, SafetensorsReader)
    inputs = _named(source) if from_hf else source.pieces
    types = {reader.tensors[piece.key].dtype for piece in inputs}
    if settings.dtype is not None:
        dtype = "float32" if source.fp32 else settings.dtype
    elif len(types) > 1:
        keys = ", ".join(piece.key for piece in inputs)
        raise CheckpointError(
            f"{keys} belong to one tensor but have the types {', '.join(sorted(types))}: choose one with dtype=NAME"
        )
    else:
        (dtype,) = types

    def make() -> Sequence[Tensor]:
        tensors: Sequence[Tensor] = [reader.read_piece(piece) for piece in inputs]
        if from_hf:
            tensors = source.rule.to_megatron(tensors, [piece.shape for piece in source.pieces])
        return tensors if to is None else to.rule.to_hf(tensors, to.shapes)

    return Work(
        tuple(Slot(piece, dtype) for piece in pieces), make, tuple(Slot(piece, dtype).label for piece in inputs)
    )


def convert(plan: Plan, settings: Settings, *, progress: bool = True) -> Path:
    """Carry out a plan, and return the target folder; the same call resumes after an interruption.

    Raises:
        CheckpointError: the source changed meanwhile, or the target cannot be written (see `write_checkpoint`).
    """
    began_with = fingerprint(plan.reader)

    def finish(folder: Path) -> None:
        if fingerprint(plan.reader) != began_with:
            raise CheckpointError(
                f"{plan.reader.path} changed while it was being read: run the same command again when it is complete"
            )
        (_finish_hf if plan.to_format == HUGGING_FACE else _finish_megatron)(plan, folder)
        if settings.template is not None:
            place = folder if plan.to_format == HUGGING_FACE else folder / EXTRAS
            place.mkdir(exist_ok=True)
            (place / "chat_template.jinja").write_text(Template.load(settings.template).source)

    return write_checkpoint(
        plan.to,
        plan.to_format,
        cut_into_parts(plan.work, settings.shard_gigabytes),
        identity=_identity(plan, settings, began_with),
        finish=finish,
        arguments=megatron_arguments(plan.description.architecture),
        finite=settings.check_finite,
        verify=settings.verify,
        progress=progress,
        remarks=plan.remarks,
    )


def is_made(plan: Plan, settings: Settings) -> bool:
    """True if the target folder already holds the result of this plan, in which case a note is printed on stderr.

    Raises:
        CheckpointError: the folder holds something else.
    """
    parts = cut_into_parts(plan.work, settings.shard_gigabytes)
    return already_made(plan.to, plan.to_format, parts, identity=_identity(plan, settings, fingerprint(plan.reader)))


def _identity(plan: Plan, settings: Settings, source: list[list[object]]) -> dict[str, Any]:
    """Everything that determines the target's content, as JSON values; `source` is the source's fingerprint."""
    return {
        "from": [str(plan.reader.path.resolve()), source],
        "beside": [] if plan.extras is None else files_identity(extra_files(plan.extras)),
        "architecture": plan.format.architecture,
        "config": dict(plan.config),
        "model": to_config(plan.description),
        "dtype": settings.dtype,
        "shard_gigabytes": settings.shard_gigabytes,
        **({"rows": rows.identity, "new_rows": settings.new_rows} if (rows := _rows(plan)) else {}),
        **({} if settings.template is None else {"template": Template.load(settings.template).source}),
    }


def _rows(plan: Plan) -> Vocabulary | None:
    return plan.reader.rows if isinstance(plan.reader, Retokenized) else None


def _finish_hf(plan: Plan, folder: Path) -> None:
    """Write config.json, the tokenizer and other files, and the format's modelling files."""
    if plan.extras is not None:
        original = read_json(plan.extras / CONFIG) if (plan.extras / CONFIG).is_file() else {}
        same = original.get("architectures") == [plan.format.architecture]
        copy_extras(plan.extras, folder, code=same and not plan.format.code)
    if plan.of_bytes:
        byte_tokenizer.write(folder)
    _replace_tokenizer(plan, folder)
    (folder / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n")
    for name in plan.format.code:
        source = importlib.resources.files("nemo_ext.checkpoint.remote_code") / name
        (folder / name).write_text(source.read_text())


def _finish_megatron(plan: Plan, folder: Path) -> None:
    """Write a model file for `--config-dir`, and copy the other files of the Hugging Face folder."""
    comment = f"Made from {plan.reader.path.name} ({plan.format.architecture})."
    write_model_file(folder, to_config(plan.description), name=plan.to.name, comment=comment)
    keep_extras(plan.extras, folder)
    _replace_tokenizer(plan, folder / EXTRAS)


def _replace_tokenizer(plan: Plan, folder: Path) -> None:
    rows = _rows(plan)
    if rows is not None and plan.tokenizer is not None:
        folder.mkdir(exist_ok=True)
        replace_files(folder, plan.tokenizer, rows)
