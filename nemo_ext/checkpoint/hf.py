"""Converting checkpoints between Hugging Face and Megatron, tensor by tensor, on one process without a GPU.

    source -> description of its model -> rows (formats/) -> parts of about a shard each -> a folder renamed at the end

Both directions are exact: no number changes unless `dtype` asks for another type.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""Megatron's names of the embedding and the output layer."""
PADDED = 128
"""Multiple up to which Megatron pads the rows of a vocabulary (its `make_vocab_size_divisible_by`)."""
ROPE_KEYS = ("rotary_base", "rotary_percent", "rotary_scaling_factor", "rope_scaling_factor", "use_rope_scaling")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """User settings of a conversion.

    Attributes:
        architecture: Hugging Face class to write; None for the first that can express the model.
        dtype: type to cast to, `bfloat16` for example; None keeps every tensor's own.
        shard_gigabytes: size of a shard, and of what an interruption loses.
        files_from: folder with tokenizer and other files for a Hugging Face checkpoint.
        change_rope: accept a checkpoint whose RoPE settings differ from the model config's; no weight depends on them.
        check_finite: refuse NaN and infinity.
        verify: read everything again at the end and compare checksums.
        iteration: iteration of the run's checkpoint to read; None for the newest.
        to_format: format to write, `huggingface` or `megatron`; None for the one that the source is not.
        tokenizer: folder of another tokenizer, for which the vocabulary's rows are made; its files go along.
        old_tokenizer: folder of the checkpoint's own; None for the one beside it.
        new_rows: row of a token that the old tokenizer lacks: `pieces`, `mean` or `zero` (`retokenize.vocabulary`).
        template: chat template that goes along in place of the tokenizer's own; see `Template.load`.
    """

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
    template: str | None = None

    def __post_init__(self) -> None:
        if self.template is not None:
            Template.load(self.template)
        for key in ("tokenizer", "old_tokenizer"):
            folder = getattr(self, key)
            if folder is not None and not (folder / TOKENIZER).is_file():
                raise ValueError(f"{key}={folder}: a folder with a {TOKENIZER} is wanted")
        if self.tokenizer is None and (self.old_tokenizer is not None or self.new_rows != "pieces"):
            raise ValueError("old_tokenizer and new_rows are for tokenizer=FOLDER: give that too")
        if self.dtype is not None:
            torch_dtype(self.dtype)
        if self.to_format not in (None, HUGGING_FACE, MEGATRON):
            raise ValueError(f"to_format={self.to_format}: expected {HUGGING_FACE} or {MEGATRON}")
        if not self.shard_gigabytes > 0:
            raise ValueError(f"shard_gigabytes={self.shard_gigabytes:g}: expected a positive number")
        if self.files_from is not None and not self.files_from.is_dir():
            raise ValueError(f"files_from={self.files_from}: no such folder")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion before it begins: everything checked, nothing written.

    Attributes:
        reader: the source.
        to: the folder to make.
        to_format: format to write, `huggingface` or `megatron`.
        description: description of the model.
        format: Hugging Face format that is written, or was read.
        config: config.json to write, for Hugging Face.
        work: work of every row of the mapping.
        extras: folder with tokenizer and other files, if any.
        tokenizer: folder of another tokenizer, whose files take the place of those of `extras`; None for none.
        remarks: notes for the user.
        of_bytes: whether the model was trained on bytes, whose tokenizer is written.
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
        """Bytes of all tensors of the target."""
        return sum(work.bytes for work in self.work)


def plan(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None = None) -> Plan:
    """Open the source, identify its model, and plan the target.

    Args:
        source: a Hugging Face folder; or a run directory, checkpoints directory or checkpoint of Megatron.
        to: the folder to make.
        settings: see `Settings`.
        config: sections `model` and `megatron`. With a `model.pattern` they are the whole model and are compared with
            the checkpoint; without one they change single keys of the config beside it; None changes nothing.

    Raises:
        ValueError: a checkpoint that is broken or does not fit the model config; a model that no format can express.
    """
    if not source.exists():
        raise CheckpointError(f"from={source}: no such folder")
    if to.resolve() == source.resolve():
        raise CheckpointError(f"to={to}: is what is converted: choose another folder")
    if is_hugging_face(source):
        return _plan_from_hf(source, to, settings, config)
    return _plan_from_megatron(source, to, settings, config)


def _plan_from_hf(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None) -> Plan:
    if settings.iteration is not None:
        raise ValueError(
            f"iteration={settings.iteration} is for a run of Megatron, {source} is Hugging Face's: leave it out"
        )
    whole = SafetensorsReader(source)
    given = read_json(source / CONFIG)
    found, description = read(given)
    off = ignored(given)
    remarks = [f"config.json: {', '.join(off)}: switched off and known to nothing here, so ignored"] if off else []
    remarks += [f"{', '.join(whole.unread)}: no files of this model's weights, so ignored"] if whole.unread else []
    wanted = _with_changes(to_config(description), config)
    if wanted is not None:
        description = _agreed(description, from_config(wanted), settings)
    expected = {n: s for e in found.entries(description) for n, s in zip(e.names, e.shapes, strict=True)}
    check_tensors(whole, expected, ignored=_harmless(whole, description, found))
    extras = settings.files_from or source
    tables = [f"{found.outside[role]}.weight" for role in ("embedding", "head")]
    pad = settings.to_format != HUGGING_FACE
    reader, description, more = _with_tokenizer(whole, tables, description, settings, beside=extras, pad=pad)
    remarks += more
    entries = list(found.entries(description))
    if settings.to_format == HUGGING_FACE:
        made = _plan_to_hf(reader, entries, to, settings, description, extras)
        return replace(made, remarks=[*remarks, *made.remarks])
    if settings.architecture is not None:
        raise ValueError(f"architecture={settings.architecture} is for writing Hugging Face checkpoints: leave it out")
    return Plan(
        reader=reader,
        to=to,
        to_format=MEGATRON,
        description=description,
        format=found,
        config={},
        work=[_work(reader, entry, entry.pieces, settings) for entry in entries],
        extras=extras,
        tokenizer=settings.tokenizer,
        remarks=[*remarks, *_padding(description)],
    )


def _plan_from_megatron(source: Path, to: Path, settings: Settings, config: Mapping[str, Any] | None) -> Plan:
    folder = checkpoint_folder(source, settings.iteration)
    if settings.iteration is not None and folder.name != f"iter_{settings.iteration:07d}":
        raise ValueError(f"iteration={settings.iteration}: {source} is one checkpoint, not a run: leave it out")
    whole = TorchDistReader(folder)
    if settings.to_format == MEGATRON:
        raise ValueError("to_format=megatron: the checkpoint is Megatron's already")
    beside = config_beside(source, folder)
    wanted = _with_changes(beside, config)
    if beside is None and wanted is None:
        raise CheckpointError(
            f"{source}: no config.yaml and no model/*.yaml beside it: say which model it is, model=..."
        )
    description = from_config(beside or wanted or {})
    if beside is not None and wanted is not None:
        description = _agreed(description, from_config(wanted), settings)
    entries = list(choose(description, settings.architecture)[0].entries(description))
    check_tensors(whole, {piece.key: piece.whole for entry in entries for piece in entry.pieces})
    extras = settings.files_from or extras_beside(source, folder)
    reader, description, remarks = _with_tokenizer(whole, TABLES, description, settings, beside=extras, pad=False)
    if remarks:
        entries = list(choose(description, settings.architecture)[0].entries(description))
    named = next((found for data in data_sections(beside or {}) if (found := data.get("tokenizer"))), None)
    made = _plan_to_hf(reader, entries, to, settings, description, extras, named)
    return replace(made, remarks=[*remarks, *made.remarks])


def _with_tokenizer(
    reader: SafetensorsReader | TorchDistReader,
    tables: Sequence[str],
    description: Description,
    settings: Settings,
    *,
    beside: Path | None,
    pad: bool,
) -> tuple[SafetensorsReader | TorchDistReader | Retokenized, Description, list[str]]:
    """The checkpoint and its description with the vocabulary of `settings.tokenizer`, if there is one, and a remark.

    Args:
        reader: the checkpoint.
        tables: names of its embedding and output layer.
        description: its description.
        settings: settings of the conversion.
        beside: folder that has the checkpoint's tokenizer, if any.
        pad: whether Megatron gets rows of padding up to a multiple of `PADDED`.
    """
    if settings.tokenizer is None:
        return reader, description, []
    old = settings.old_tokenizer or beside
    if old is None or not (old / TOKENIZER).is_file():
        raise ValueError("tokenizer: the checkpoint's own tokenizer is not beside it: name it, old_tokenizer=FOLDER")
    made = vocabulary(old, settings.tokenizer, rows=description.vocab_size, new_rows=settings.new_rows)
    rows = -(-made.size // PADDED) * PADDED if pad else made.size
    architecture = replace(description.architecture, vocab_size=rows)
    changed = replace(description, vocab_size=made.size, architecture=architecture)
    return Retokenized(reader, tables, made), changed, [made.told()]


def _harmless(reader: SafetensorsReader, description: Description, found: Format) -> list[str]:
    """Tensors of older checkpoints that may be ignored: RoPE's frequencies, a copy of a tied output layer."""
    names = [name for name in reader.tensors if name.endswith(".rotary_emb.inv_freq")]
    head, table = (f"{found.outside[role]}.weight" for role in ("head", "embedding"))
    if description.architecture.tied_embeddings and {head, table} <= reader.tensors.keys():
        import torch

        if torch.equal(reader.read(head), reader.read(table)):
            names.append(head)
    return names


def _with_changes(beside: Mapping[str, Any] | None, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Config of the model that the user asked for, or the checkpoint's with single keys changed; None if unchanged."""
    given = {name: dict((config or {}).get(name) or {}) for name in ("model", "megatron")}
    given["model"] = {key: value for key, value in given["model"].items() if value is not None}
    if given["model"].get("pattern"):
        return given
    if not any(given.values()):
        return None
    if beside is None:
        raise CheckpointError("which model is it? model=... ; single keys can only change a config that lies beside")
    changed = {name: {**beside[name], **given[name]} for name in given}
    for name, keys in given.items():
        check_effect(changed, name, keys)
    return changed


def check_effect(config: Mapping[str, Mapping[str, Any]], section: str, keys: Mapping[str, Any]) -> None:
    """Refuse keys that say nothing about the model.

    Raises:
        ValueError: a key does not affect the model; names the nearest that does.
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
            raise ValueError(f"{section}.{key}: says nothing about a checkpoint's model: leave it out{hint}")


def _plan_to_hf(
    reader: SafetensorsReader | TorchDistReader | Retokenized,
    entries: Sequence[Entry],
    to: Path,
    settings: Settings,
    description: Description,
    extras: Path | None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Plan:
    found, config = choose(description, settings.architecture)
    targets = list(found.entries(description))
    if [entry.pieces for entry in targets] != [entry.pieces for entry in entries]:
        raise ValueError(f"{found.architecture} keeps experts in other pieces: convert to Megatron first, then to it")
    pairs = zip(entries, targets, strict=True)
    work = [_work(reader, entry, _named(target), settings, to=target) for entry, target in pairs]
    kept = kept_keys(extras, found)
    of_bytes = extras is None and tokenizer == {"kind": "byte"}
    if of_bytes:
        kept["eos_token_id"] = ByteTokenizer.eod
    if isinstance(reader, Retokenized):
        kept |= reader.rows.new_ids(kept)
    config = {**kept, **config, "dtype": _main_type(work)}
    config["torch_dtype"] = config["dtype"]  # the name before transformers 4.56
    # A run on shorter sequences than the model knows does not make it forget the longer ones.
    config[LONGEST] = max(config[LONGEST], int(kept.get(LONGEST) or 0))
    scaled = _yarn_length(description)
    config[LONGEST] = max(config[LONGEST], scaled)
    left_out = 0 if isinstance(reader, SafetensorsReader) else reader.left_out
    remarks = [*found.remarks(description), *_padding(description)]
    if scaled and config[LONGEST] != scaled:
        remarks.append(
            f"transformers 4 takes YaRN's factor from {LONGEST}={config[LONGEST]}, where rope_scaling means {scaled}: "
            "load it with transformers 5 or vLLM"
        )
    if left_out:
        remarks.append(f"{left_out} tensors of optimizer state stay behind: Hugging Face has no place for them")
    if extras is None and not of_bytes:
        own = f"; its data were tokenised by {tokenizer['path']}" if tokenizer and "path" in tokenizer else ""
        remarks.append(
            f"no tokenizer goes with it: files_from=FOLDER adds one, with generation config and chat template{own}"
        )
    return Plan(
        reader=reader,
        to=to,
        to_format=HUGGING_FACE,
        description=description,
        format=found,
        config=config,
        work=work,
        extras=extras,
        tokenizer=settings.tokenizer,
        remarks=remarks,
        of_bytes=of_bytes,
    )


def _yarn_length(description: Description) -> int:
    """Longest sequence that YaRN's factor stands for, 0 without YaRN."""
    rope = description.rope
    return int(rope.factor * rope.original_positions) if rope is not None and rope.scaling == "yarn" else 0


def _main_type(work: Sequence[Work]) -> str:
    """Name of the type that takes the most bytes."""
    bytes_of: dict[str, int] = {}
    for slot in (slot for each in work for slot in each.slots):
        bytes_of[slot.dtype] = bytes_of.get(slot.dtype, 0) + slot.bytes
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])


def _agreed(checkpoint: Description, wanted: Description, settings: Settings) -> Description:
    """The wanted description, with the checkpoint's layers if it has none; both must describe the same function."""
    found = differences(checkpoint, wanted)
    rope = [name for name in found if name.startswith("rope.")]
    if settings.change_rope:
        for name in rope:
            notice(f"RoPE changes: {found.pop(name)}")
    if found:
        hint = (
            "; change_rope=true accepts the RoPE settings of the model config"
            if rope and not settings.change_rope
            else ""
        )
        lines = "".join(f"\n  {line}" for line in found.values())
        raise CheckpointError(
            f"the checkpoint is of another model than the model config:{lines}\nchoose model=...{hint}"
        )
    if wanted.hf_layers is not None:
        return wanted
    return replace(wanted, hf_layers=checkpoint.hf_layers, hf_layer_count=checkpoint.hf_layer_count)


def _padding(description: Description) -> list[str]:
    padding = description.architecture.vocab_size - description.vocab_size
    return (
        [f"{padding} rows of the vocabulary are padding: Megatron's alone, zero where they are made"] if padding else []
    )


def _named(entry: Entry) -> tuple[Piece, ...]:
    return tuple(Piece.of(name, *shape) for name, shape in zip(entry.names, entry.shapes, strict=True))


def _work(
    reader: SafetensorsReader | TorchDistReader | Retokenized,
    source: Entry,
    made: tuple[Piece, ...],
    settings: Settings,
    *,
    to: Entry | None = None,
) -> Work:
    """Work of one row.

    Args:
        reader: the source.
        source: the row in the source.
        made: pieces to make of it.
        settings: settings of the conversion, for the type.
        to: the row in the Hugging Face target; None makes Megatron's pieces.
    """
    from_hf = isinstance(reader.reader if isinstance(reader, Retokenized) else reader, SafetensorsReader)
    given = _named(source) if from_hf else source.pieces
    types = {reader.tensors[piece.key].dtype for piece in given}
    if settings.dtype is not None:
        dtype = "float32" if source.fp32 else settings.dtype
    elif len(types) > 1:
        keys = ", ".join(piece.key for piece in given)
        raise CheckpointError(
            f"{keys}: go into one tensor but are of types {', '.join(sorted(types))}: choose one for all, dtype=..."
        )
    else:
        (dtype,) = types

    def make() -> Sequence[Tensor]:
        tensors: Sequence[Tensor] = [reader.read_piece(piece) for piece in given]
        if from_hf:
            tensors = source.rule.to_megatron(tensors, [piece.shape for piece in source.pieces])
        return tensors if to is None else to.rule.to_hf(tensors, to.shapes)

    return Work(tuple(Slot(piece, dtype) for piece in made), make, tuple(Slot(piece, dtype).label for piece in given))


def convert(plan: Plan, settings: Settings, *, progress: bool = True) -> Path:
    """Carry out a plan; the same call after an interruption resumes it.

    Raises:
        CheckpointError: see `write_checkpoint`.
    """
    began_with = fingerprint(plan.reader)

    def finish(folder: Path) -> None:
        if fingerprint(plan.reader) != began_with:
            raise CheckpointError(f"{plan.reader.path}: changed while it was read: repeat when it is complete")
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
    """True if the folder holds what the plan would make; then says so on stderr.

    Raises:
        CheckpointError: it holds something else.
    """
    parts = cut_into_parts(plan.work, settings.shard_gigabytes)
    return already_made(plan.to, plan.to_format, parts, identity=_identity(plan, settings, fingerprint(plan.reader)))


def _identity(plan: Plan, settings: Settings, source: list[list[object]]) -> dict[str, Any]:
    """Everything that decides a folder's content; `source` is the fingerprint of the checkpoint that is read."""
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
    """Write config, tokenizer and modelling files."""
    if plan.extras is not None:
        original = read_json(plan.extras / CONFIG) if (plan.extras / CONFIG).is_file() else {}
        copy_extras(plan.extras, folder, code=original.get("architectures") == [plan.format.architecture])
    if plan.of_bytes:
        byte_tokenizer.write(folder)
    _replace_tokenizer(plan, folder)
    (folder / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n")
    for name in plan.format.code:
        source = importlib.resources.files("nemo_ext.checkpoint.remote_code") / name
        (folder / name).write_text(source.read_text())


def _finish_megatron(plan: Plan, folder: Path) -> None:
    """Write a model file for `--config-dir`, and the other files of the Hugging Face folder."""
    comment = f"Made from {plan.reader.path.name} ({plan.format.architecture})."
    write_model_file(folder, to_config(plan.description), name=plan.to.name, comment=comment)
    keep_extras(plan.extras, folder)
    _replace_tokenizer(plan, folder / EXTRAS)


def _replace_tokenizer(plan: Plan, folder: Path) -> None:
    rows = _rows(plan)
    if rows is not None and plan.tokenizer is not None:
        folder.mkdir(exist_ok=True)
        replace_files(folder, plan.tokenizer, rows)
