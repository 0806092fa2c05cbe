"""Engines that nemo_ext can use, and a probe that imports an engine in a separate process with a time limit.

The process is separate because an import may crash, hang or print. It runs this file as a script, which is why only the
standard library is imported at the top.
"""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TIME_LIMIT = 60.0
"""Default time limit for importing an engine, in seconds; vLLM from an uncached network disk needs most of it."""


@dataclass(frozen=True)
class Engine:
    """Package that nemo_ext can use.

    Attributes:
        name: Name of the engine: its module's name with `-` in place of dots.
        distribution: Distribution name for pip.
        imports: Imports that nemo_ext needs, as `module` or `module:attribute`; all are tested.
        enables: Features of nemo_ext that it enables.
        install: Command that installs it; `{requirement}` is replaced by the distribution with version bounds.
        needs: Names of the engines that it requires.
        needs_gpu: True if it requires an NVIDIA GPU.
        part: Subfolder that distinguishes the package from an empty release or another package of the same name.
        wrong: Message if that folder is missing.
        root_variable: Environment variable with the path of a source checkout.
        without_gpu: Features available without a GPU; "" for all.
        required: True if training is impossible without it.
    """

    name: str
    distribution: str
    imports: tuple[str, ...]
    enables: str
    install: str = "pip install {requirement}"
    needs: tuple[str, ...] = ("torch",)
    needs_gpu: bool = False
    part: str = ""
    wrong: str = ""
    root_variable: str = ""
    without_gpu: str = ""
    required: bool = False

    @property
    def module(self) -> str:
        """Name of the module to look for to tell whether the package is installed."""
        return self.name.replace("-", ".")


_BUILD = "pip install --no-build-isolation {requirement}"
_APEX = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex"
_NEMO_RL = "git clone --recursive https://github.com/NVIDIA-NeMo/RL nemo-rl && export NEMO_RL_ROOT=$PWD/nemo-rl"

OLDEST_MEGATRON = "0.18.2"
"""Oldest Megatron-Core version with which the tests listed in docs/installs.md pass."""
UNTESTED_MEGATRON = (0, 21)
"""First Megatron-Core version that jobs reject; pyproject.toml has the same bound."""

ENGINES = (
    Engine("hydra", "hydra-core", ("hydra", "omegaconf"), "configuration of every job", needs=(), required=True),
    Engine("torch", "torch", ("torch",), "tensors, and training on CPUs without a GPU", needs=(), required=True),
    Engine(
        "megatron-core",
        "megatron-core",
        ("megatron.core", "megatron.training", "megatron.core.models.hybrid.hybrid_model:HybridModel"),
        "training (nemo-ext train)",
        required=True,
    ),
    Engine(
        "transformer_engine",
        "transformer-engine",
        ("transformer_engine.pytorch:Linear",),
        "fused layers and attention on GPUs (model.backend=transformer_engine)",
        _BUILD,
        needs_gpu=True,
    ),
    Engine(
        "mamba_ssm",
        "mamba-ssm",
        ("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined", "triton"),
        "Mamba-2's Triton kernels; without them torch kernels, slower",
        _BUILD,
        needs_gpu=True,
    ),
    Engine(
        "causal_conv1d",
        "causal-conv1d",
        ("causal_conv1d:causal_conv1d_fn",),
        "Mamba-2's fused convolution; without it torch's, slower",
        _BUILD,
        needs_gpu=True,
    ),
    Engine(
        "apex",
        "apex",
        ("torch", "apex.normalization", "amp_C"),
        "fused Adam and gradient clipping on GPUs without Transformer Engine",
        _APEX,
        needs_gpu=True,
        part="normalization",
        wrong="NVIDIA's apex: the installed apex is another project of the same name",
    ),
    Engine(
        "megatron-bridge",
        "megatron-bridge",
        ("megatron.bridge:AutoBridge",),
        "Hugging Face checkpoints in NeMo-RL's Megatron policy",
        needs=("torch", "megatron-core", "transformer_engine"),
    ),
    Engine(
        "nemo_rl",
        "nemo-rl",
        ("nemo_rl.algorithms.grpo:grpo_train",),
        "GRPO and DPO on many GPUs",
        _NEMO_RL,
        part="algorithms",
        wrong=": the installed nemo_rl is PyPI's empty package",
        root_variable="NEMO_RL_ROOT",
        without_gpu="only environments and tests: policies train on GPUs",
    ),
    Engine(
        "nemo_gym",
        "nemo-gym",
        ("nemo_gym.base_resources_server:SimpleResourcesServer",),
        "environments and verifiers as servers",
        needs=(),
    ),
    Engine("trl", "trl", ("trl:DPOTrainer", "trl:GRPOTrainer"), "DPO, GRPO and RLOO on one machine"),
    Engine(
        "modelopt",
        "nvidia-modelopt",
        ("modelopt.torch.quantization:quantize", "transformers"),
        "FP8 checkpoints for vLLM (nemo-ext quantize)",
    ),
    Engine("vllm", "vllm", ("vllm:LLM",), "fast generation, for evaluation and for RL", needs_gpu=True),
)


def require(*names: str) -> None:
    """Check that a job's engines are installed. Only torch is imported, as its libraries may be incompatible.

    Raises:
        ValueError: an engine is not installed, Megatron-Core has no hybrid models or is too new, or torch cannot be
            imported; the message states the remedy.
    """
    missing = [engine for engine in ENGINES if engine.name in names and not folder_of(engine.module)]
    if missing:
        raise ValueError(
            f"this job requires {' and '.join(engine.distribution for engine in missing)}: pip install "
            "'nemo_ext[engine]' (`nemo-ext doctor --install` shows what that would change here)"
        )
    if "megatron-core" in names and not folder_of("megatron.core.models.hybrid.hybrid_block"):
        raise ValueError(
            f"this job requires megatron-core {OLDEST_MEGATRON} or later (docs/installs.md), but the installed version "
            f"has no core.models.hybrid: pip install 'megatron-core>={OLDEST_MEGATRON}'"
        )
    if "megatron-core" in names and not os.environ.get("NEMO_EXT_UNTESTED"):
        from nemo_ext.megatron.versions import installed, spelled

        if installed() >= UNTESTED_MEGATRON:
            raise ValueError(
                f"megatron-core {spelled(installed())} is newer than the versions tested with this nemo_ext: install a "
                f"newer nemo_ext, or 'megatron-core<{spelled(UNTESTED_MEGATRON)}'; set NEMO_EXT_UNTESTED=1 to use it "
                "anyway"
            )
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise ValueError(f"torch is installed but cannot be imported ({error}): see `nemo-ext doctor torch`") from error


def folder_of(module: str, path: Sequence[str] | None = None) -> str:
    """Find the folder that a module would be imported from, without importing it; "" if the module does not exist.

    Args:
        module: dotted name of the module; unlike with `find_spec`, its parent packages are not imported either.
        path: folders to search; None for Python's import path.
    """
    parts, origin, places = module.split("."), None, path
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        everywhere = depth == 0 and path is None
        spec = importlib.util.find_spec(name) if everywhere else importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return ""
        origin, places = spec.origin, list(spec.submodule_search_locations or [])
    return str(Path(origin).parent) if origin else ""  # an empty folder left by an uninstalled package has none


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of importing an engine.

    Attributes:
        found: True if a package with the module's name is installed.
        version: Installed version, or None if unknown.
        whole: False if the folder `Engine.part` is missing.
        error: Error message in one line; empty if everything was imported.
        module: Name of the module that was not found, if that was the error; otherwise empty.
        timed_out: True if the import was stopped at the time limit.
        cuda: For torch only: `build`, `devices` (name, capability, memory_bytes) and `problem`.
    """

    found: bool = False
    version: str | None = None
    whole: bool = True
    error: str = ""
    module: str = ""
    timed_out: bool = False
    cuda: Mapping[str, Any] | None = None


def probe(engine: Engine, *, time_limit: float = TIME_LIMIT, stop: threading.Event | None = None) -> Outcome:
    """Import an engine in a separate process, and return the result.

    Args:
        engine: Engine to import.
        time_limit: Seconds after which the process group is killed.
        stop: Event that, when set, kills the process group at once.
    """
    environment = dict(os.environ)
    root = environment.get(engine.root_variable) if engine.root_variable else None
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    order = {key: getattr(engine, key) for key in ("distribution", "module", "imports", "part")}
    order["checkout"] = root is not None
    # -P: this file's folder must not be added to the import path.
    command = [sys.executable, "-P", __file__, json.dumps(order)]
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=noise, env=environment, start_new_session=True
        )
        deadline = time.monotonic() + time_limit
        while process.poll() is None:
            if time.monotonic() > deadline or (stop is not None and stop.is_set()):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return Outcome(found=True, timed_out=True, error=f"the import took longer than {time_limit:g} s")
            time.sleep(0.02)
        answer.seek(0)
        text = answer.read()
        if text:
            return Outcome(**json.loads(text))
        return Outcome(found=True, error=_last_words(process.returncode, noise))


def _last_words(code: int, noise: IO[bytes]) -> str:
    """Describe in one line how a process with exit code `code` and output `noise` ended without a result."""
    if code < 0:
        return f"the import ended with {signal.Signals(-code).name}"
    noise.seek(0)
    lines = noise.read().decode(errors="replace").split("\n")
    return f"the import ended the process with code {code}: {next(filter(None, reversed(lines)), '')[:200]}"


# The rest runs in the importing process.


def _import_here(order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        spec = importlib.util.find_spec(order["module"])
    except ModuleNotFoundError:  # no parent package
        spec = None
    if spec is None or spec.origin is None:  # an empty folder left by an uninstalled package has no origin
        return {"found": False}
    answer: dict[str, Any] = {"found": True, "version": _version(order["distribution"])}
    folders = spec.submodule_search_locations or []
    if order["part"] and not any((Path(folder) / order["part"]).exists() for folder in folders):
        return answer | {"whole": False}
    try:
        for word in order["imports"]:
            module, _, attribute = word.partition(":")
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
        if order["module"] == "torch":
            answer["cuda"] = _cuda()
    except (Exception, SystemExit) as error:
        answer["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        answer["module"] = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if order["checkout"] or answer["version"] is None:
        version = getattr(sys.modules.get(order["module"]), "__version__", None)
        answer["version"] = None if version is None else str(version)
    return answer


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = str(caught[-1].message).split("\n")[0] if caught else ""
    devices = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = [properties.major, properties.minor]
        devices.append({"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory})
    if devices:
        try:
            # A build without kernels for this GPU detects it but fails here.
            problem = "" if torch.ones(2, device="cuda").sum().item() == 2 else "a sum on the GPU gave a wrong result"
        except RuntimeError as error:
            problem = str(error).split("\n")[0]
    return {"build": torch.version.cuda, "devices": devices, "problem": problem}


def _main() -> None:
    """Probe the engine named in this process's arguments, and write the outcome as JSON to stdout.

    The engine's own output goes to stderr. The process exits at once, as some engines hang at exit.
    """
    channel = os.dup(1)
    os.dup2(2, 1)
    answer = _import_here(json.loads(sys.argv[1]))
    os.write(channel, json.dumps(answer).encode())
    os._exit(0)


if __name__ == "__main__":
    _main()
