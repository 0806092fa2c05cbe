"""The `quantize` job: makes an FP8 checkpoint for vLLM from a checkpoint and a precision plan, with a report."""

import contextlib
import importlib.resources
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture.precision_plan import Plan, weight_bytes
from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.beside import read_json
from nemo_ext.checkpoint.formats import Format
from nemo_ext.checkpoint.output import (
    LOCK,
    RECORD,
    Output,
    check_room,
    check_target,
    folder_to_make,
    only_writer,
    was_published,
)
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError, files_identity, fingerprint
from nemo_ext.checkpoint.writing import HUGGING_FACE
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.quantization import export, report
from nemo_ext.quantization.calibration import CalibrationData, CalibrationSettings, batches, data_files, load
from nemo_ext.quantization.comparison import Comparison, compare
from nemo_ext.quantization.generation import serve_words
from nemo_ext.quantization.modelopt import (
    Matrix,
    check_calibrated,
    check_quantizers,
    excluded,
    matrices,
    parameters,
    quantize_config,
)
from nemo_ext.quantization.servable import check_servable
from nemo_ext.quantization.settings import read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WITHOUT_MODELOPT = "nemo-ext quantize requires ModelOpt: pip install 'nemo_ext[ptq]'"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A checked quantisation job, before anything is written.

    Attributes:
        conversion: plan for reading the source; a Megatron checkpoint is converted to Hugging Face format.
        conversion_settings: settings of the conversion.
        to: directory to write to.
        plan: precision plan of the weights.
        calibration: settings of the calibration data.
        device: device on which the model runs.
        listed: the checkpoint's matrices with their precisions.
        remarks: remarks for the user.
    """

    conversion: hf.Plan
    conversion_settings: hf.Settings
    to: Path
    plan: Plan
    calibration: CalibrationSettings
    device: str
    listed: Sequence[Matrix]
    remarks: Sequence[str]

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors in the Hugging Face checkpoint."""
        return [name for entry in self.conversion.format.entries(self.conversion.description) for name in entry.names]

    @property
    def converted(self) -> Path:
        """Temporary directory for a Megatron checkpoint in Hugging Face format, removed when the job is done."""
        return self.to.with_name(f".{self.to.name}.huggingface")

    def identity(self) -> dict[str, Any]:
        """Return the inputs that determine the directory's content, used to resume the job."""
        reader = self.conversion.reader
        return {
            "from": [str(reader.path.resolve()), fingerprint(reader)],
            "files_from": str(self.conversion.extras),
            "plan": repr(self.plan),
            "calibration": asdict(self.calibration),
            "data": files_identity(data_files(self.calibration)),
            "shard_gigabytes": self.conversion_settings.shard_gigabytes,
        }


def run(config: Mapping[str, Any]) -> None:
    """Quantise a checkpoint as configured.

    Raises:
        ValueError: a key is invalid, no engine can serve the model or plan, or ModelOpt is not installed.
    """
    work = prepare(config)
    if (
        work.plan.recipe == "mxfp8"
        and work.device == "cpu"
        and (work.calibration.held_out or work.plan.kv_cache == "fp8")
    ):
        raise ValueError(
            "precision_plan.recipe=mxfp8 requires a GPU, as ModelOpt runs such a model only on GPUs: without one, set "
            "calibration.held_out=0 and precision_plan.kv_cache=bf16"
        )
    check_target(work.to)
    if find_spec("modelopt") is None and not was_published(work.to, work.identity()):
        raise ValueError(_WITHOUT_MODELOPT)
    with only_writer(work.to):
        if was_published(work.to, work.identity()):
            shutil.rmtree(work.converted, ignore_errors=True)
            notice(f"{work.to} is already finished; {report.SERVE}: {' '.join(serve_words(work.to, work.plan))}")
            return
        check_room(work.to, work.conversion.bytes)
        _quantise(work)
    shutil.rmtree(work.converted, ignore_errors=True)
    notice(f"done: {work.to}, {work.to / report.MARKDOWN}")


def prepare(config: Mapping[str, Any]) -> Work:
    """Check everything that can be checked before the model is loaded, and return the checked job.

    Raises:
        ValueError: a key is invalid, or no engine can serve the model or plan.
    """
    options = read_settings(config)
    to, plan = folder_to_make(options.to), options.plan
    settings = hf.Settings(
        shard_gigabytes=options.shard_gigabytes, files_from=options.files_from, iteration=options.iteration
    )
    conversion = hf.plan(options.source, to.with_name(f".{to.name}.huggingface"), settings)
    description, checkpoint_format = conversion.description, conversion.format
    if description.prediction:
        raise ValueError(f"from={options.source} has multi-token prediction: first convert it with mtp=drop")
    listed = matrices(plan, description, checkpoint_format)
    remarks = check_servable(plan, description, checkpoint_format, listed)
    return Work(
        conversion=conversion,
        conversion_settings=settings,
        to=to,
        plan=plan,
        calibration=options.calibration,
        device=resolved_device(options.device),
        listed=listed,
        remarks=remarks,
    )


def resolved_device(name: str) -> str:
    """Resolve a device name; `auto` is `cuda` if there are GPUs, else `cpu`.

    Raises:
        ValueError: the device is unknown to torch or not available here.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: expected auto, cpu, cuda or a GPU such as cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={name}, but CUDA is not available: use device=cpu, which is slow except for small models"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}, but there are only {torch.cuda.device_count()} GPUs, numbered from cuda:0")
    return name


def _quantise(work: Work) -> None:
    vocabulary = work.conversion.description.vocab_size
    beside = work.conversion.extras or work.conversion.reader.path
    data = load(work.calibration, model=beside, vocab_size=vocabulary)
    notice(f"calibration: {len(data.samples):,} of {data.available:,} samples, {data.tokens:,} tokens")
    output = Output(work.to, work.identity())
    for file in output.folder.iterdir():
        if file.name not in (LOCK, RECORD):
            file.unlink()
    source = _hugging_face(work)
    for remark in work.remarks:
        notice(f"note: {remark}")
    model = load_model(source.path, work.conversion.format, work.device)
    names = parameters(model, work.tensors)
    calibrate(model, work, names, data)
    compared: Comparison | None = None
    if data.held_out:
        held_out = batches(data.held_out, batch_tokens=work.calibration.batch_tokens)
        compared = compare(model, held_out, samples=len(data.held_out))
    export.export(
        model,
        output.folder,
        source=source,
        listed=work.listed,
        exclude=excluded(work.listed, work.conversion.format.outside["head"]),
        names=names,
        extras=source.path if work.conversion.to_format == HUGGING_FACE else beside,
        shard_gigabytes=work.conversion_settings.shard_gigabytes,
    )
    sizes = export.check(output.folder, source=source, listed=work.listed, tensors=work.tensors)
    architecture = replace(work.conversion.description.architecture, vocab_size=vocabulary)
    report.write(
        output.folder,
        report.Quantized(
            source=str(work.conversion.reader.path),
            to=work.to,
            architecture=work.conversion.format.architecture,
            plan=work.plan,
            predicted=weight_bytes(work.plan, architecture),
            sizes=sizes,
            data=data,
            calibration=work.calibration,
            comparison=compared,
            remarks=work.remarks,
        ),
    )
    output.publish({"format": "modelopt", "from": str(work.conversion.reader.path)})


def _hugging_face(work: Work) -> SafetensorsReader:
    """Open the source, converting it to Hugging Face format first if it is a Megatron checkpoint."""
    reader = work.conversion.reader
    if isinstance(reader, SafetensorsReader):
        return reader
    assert work.conversion.to_format == HUGGING_FACE
    notice(f"{reader.path} is a Megatron checkpoint and is first converted to {work.converted}")
    try:
        hf.is_made(work.conversion, work.conversion_settings)
    except CheckpointError:  # left by an interrupted run from another checkpoint
        shutil.rmtree(work.converted)
    hf.convert(work.conversion, work.conversion_settings)
    return SafetensorsReader(work.converted)


def load_model(folder: Path, found: Format, device: str) -> "PreTrainedModel":
    """Load the model with transformers, in the checkpoint's types.

    If transformers does not have the model's class, our own modelling files are run, never those in the directory.

    Args:
        folder: Hugging Face directory.
        found: format of the checkpoint.
        device: device name; with `cuda`, several GPUs share the model if accelerate is installed.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_accelerate_available

    spread = device == "cuda" and torch.cuda.device_count() > 1 and is_accelerate_available()
    with _with_own_code(folder, found) as readable:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            readable, dtype="auto", trust_remote_code=bool(found.code), **({"device_map": "auto"} if spread else {})
        )
    return (model if spread else model.to(device)).eval()


@contextlib.contextmanager
def _with_own_code(folder: Path, found: Format) -> Iterator[Path]:
    """Yield the directory or, if its format needs modelling files, a temporary copy (by links) that contains ours."""
    if not found.code:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        readable = Path(temporary) / folder.name.replace(".", "_")
        readable.mkdir()
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".py" and file.name != CONFIG:
                os.symlink(file.resolve(), readable / file.name)
        for name in found.code:
            shutil.copyfile(str(importlib.resources.files("nemo_ext.checkpoint.remote_code") / name), readable / name)
        config = read_json(folder / CONFIG)
        classes = {
            "AutoConfig": found.architecture.replace("ForCausalLM", "Config"),
            "AutoModelForCausalLM": found.architecture,
        }
        config["auto_map"] = {
            loader: f"{Path(file).stem}.{name}"
            for file, (loader, name) in zip(found.code, classes.items(), strict=True)
        }
        (readable / CONFIG).write_text(json.dumps(config))
        yield readable


def calibrate(model: "PreTrainedModel", work: Work, names: Mapping[str, str], data: CalibrationData) -> None:
    """Insert ModelOpt's quantizers into the model and calibrate their scales on the samples.

    Args:
        model: the model, which is changed in place.
        work: the job, with the precision plan.
        names: mapping from the checkpoint's tensors to parameter names in the model, from `modelopt.parameters`.
        data: calibration samples.

    Raises:
        ValueError: ModelOpt is not installed, or no sample reached a quantizer.
    """
    import torch

    try:
        import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise ValueError(f"{_WITHOUT_MODELOPT} ({error})") from None
    config = quantize_config(work.plan, work.listed, names)
    # The last position's logits are enough, unless the output layer has a scale that needs all positions.
    head = any(matrix.weight.block is None and matrix.precision == "fp8" for matrix in work.listed)
    few = {} if head else {"logits_to_keep": 1}

    def forward(model: "PreTrainedModel") -> None:
        with torch.inference_mode(), progress_of("calibrating", len(data.samples), unit="samples") as advance:
            for batch in batches(data.samples, batch_tokens=work.calibration.batch_tokens):
                model(torch.from_numpy(batch).to(model.device), use_cache=False, **few)
                advance(len(batch))

    with export.prints_to_stderr():
        mtq.quantize(model, config, forward if config["algorithm"] else None)
    check_quantizers(model, config)
    check_calibrated(model)
