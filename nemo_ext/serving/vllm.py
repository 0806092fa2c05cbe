"""vLLM as the engine: its command line for a model, and its process.

Sources: vllm/tool_parsers and vllm/reasoning (0.33) for names of parsers, and vllm/engine/arg_utils.py for multi-node
flags.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint import formats
from nemo_ext.checkpoint.beside import read_json
from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.checkpoint.safetensors_files import CONFIG, tensor_names
from nemo_ext.engines import folder_of as module_folder
from nemo_ext.job.parent import end, end_with_parent
from nemo_ext.quantization.generation import cli_words
from nemo_ext.serving.settings import ServingSettings

KEY = "VLLM_API_KEY"
"""Environment variable from which vLLM reads its key."""
_STYLES = {"<function=": "qwen3_coder", "<function_calls>": "olmo3", "<tool_call>": "hermes"}
"""Mapping from a template's markup to vLLM's tool call parser; vLLM has none for Llama-Nemotron's <TOOLCALL>."""
_REASONING = {"qwen3_coder": "nemotron_v3", "olmo3": "olmo3"}
_OTHER_REASONING = "qwen3"
_FIRST_NODE = "SLURM_LAUNCH_NODE_IPADDR"
"""Environment variable of srun's tasks that holds the address of the node on which srun was called."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""First port and number of ports of multi-node replicas, below Linux's ephemeral range, which begins at 32768."""
_SECONDS_TO_STOP = 60.0
_DRAFTS = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
_DRAFT_MODEL = "vllm.model_executor.models.nemotron_h_mtp"
"""vLLM's model that drafts tokens for the classes in `_DRAFTS`."""
_WEIGHTS = "mtp."
"""Prefix of the names of the tensors of multi-token prediction in the classes in `_DRAFTS`."""


class Ended(Exception):
    """Raised if a server ends unexpectedly; a restart may succeed."""


def command(
    folder: Path,
    settings: ServingSettings,
    config: Mapping[str, Any],
    *,
    port: int = 0,
    rank: int = 0,
) -> list[str]:
    """Build the command line of `vllm serve` for a model, without the key.

    Args:
        folder: Hugging Face directory.
        config: composed config, which holds the consent to run the directory's code.
        rank: number of this node in a multi-node replica; the first node runs the server.

    Raises:
        ValueError: the directory's code requires consent, vLLM cannot draft tokens with the model, or several nodes
            are used without Slurm.
    """
    arguments: dict[str, Any] = {
        "host": settings.host,
        "port": port,
        "served_model_name": settings.name,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "tensor_parallel_size": settings.gpus if settings.gpus * settings.nodes > 1 else None,
        "pipeline_parallel_size": settings.nodes if settings.nodes > 1 else None,
        "trust_remote_code": may_run_code(str(folder), config) or None,
        **_precision(folder),
        **parsers(folder),
    }
    if settings.draft is not None:
        check_drafts(read_json(folder / CONFIG), str(folder), folder)
        drafts = {"method": settings.draft, "num_speculative_tokens": settings.draft_tokens or 1}
        arguments["speculative_config"] = drafts
    if settings.nodes > 1:
        if (first := os.environ.get(_FIRST_NODE)) is None:
            raise ValueError(f"serving.nodes={settings.nodes} requires Slurm; use `nemo-ext submit job=serve`")
        arguments |= {
            "nnodes": settings.nodes,
            "node_rank": rank,
            "master_addr": first,
            # vLLM's default is one port for all servers; jobs that share a node differ in their numbers.
            "master_port": _FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % _PORTS,
            "headless": rank > 0 or None,
        }
    arguments |= settings.vllm
    switches = [f"--{key.replace('_', '-')}" for key, value in arguments.items() if value is True]
    values = {key: value for key, value in arguments.items() if value is not None and not isinstance(value, bool)}
    off = [f"--no-{key.replace('_', '-')}" for key, value in arguments.items() if value is False]
    return ["vllm", "serve", str(folder), *cli_words(values), *switches, *off]


def check_drafts(model: Mapping[str, Any], name: str, folder: Path | None = None) -> None:
    """Check that vLLM can draft tokens with a model's multi-token prediction (MTP).

    Args:
        model: the model's config.json, or the config with sections `model` and `megatron` of a Megatron run.
        name: the model as the user wrote it, for messages.
        folder: the Hugging Face directory, whose weights must have MTP too; None for a Megatron run.

    Raises:
        ValueError: the model or its weights have no MTP, no Hugging Face format can represent the model, or vLLM does
            not support its class or its number of prediction depths.
    """
    try:
        architecture, description = _with_format(model)
    except ValueError as error:
        raise ValueError(f"serving.draft=mtp: model={name}: {error}; set serving.draft=null") from error
    names = tensor_names(folder) if folder is not None else set()
    pattern = description.architecture.pattern
    reason = None
    if not pattern.mtp:
        reason = "has no multi-token prediction"
    elif architecture not in _DRAFTS:
        reason = f"is in the format {architecture}, for which vLLM cannot draft tokens"
    elif pattern.depths > 1:
        reason = f"has {pattern.depths} prediction depths with their own weights, and vLLM drafts with one depth"
    elif other := sorted({block.kind for block in pattern.mtp} - set("*E")):
        reason = f"has blocks {' '.join(other)} in its prediction depth, and vLLM drafts only with * and E"
    elif names and not any(tensor.startswith(_WEIGHTS) for tensor in names):
        reason = f"has multi-token prediction only in its config: its weights have no tensors {_WEIGHTS}*"
    if reason is not None:
        raise ValueError(f"serving.draft=mtp: model={name} {reason}; set serving.draft=null")
    if module_folder("vllm") and not module_folder(_DRAFT_MODEL):
        raise ValueError(
            "serving.draft=mtp: the installed vLLM has no model nemotron_h_mtp; install a newer vLLM, or set "
            "serving.draft=null"
        )
    if _keeps_rejected() and any(block.kind == "M" for block in pattern.blocks):
        raise ValueError(
            "serving.draft=mtp: the installed vLLM for CPUs returns wrong tokens, as its Mamba-2 convolution keeps "
            "rejected drafts; set serving.draft=null"
        )


def _with_format(model: Mapping[str, Any]) -> tuple[str, Description]:
    """Return the class name and description of a model, given as in `check_drafts`; ValueError if it has no format."""
    if "architectures" in model:
        found, description = formats.read({key: value for key, value in model.items() if key != "quantization_config"})
        return found.architecture, description
    description = from_config(model)
    try:
        return formats.choose(description)[0].architecture, description
    except ValueError:
        if description.prediction:
            formats.choose(description, _DRAFTS[-1])  # gives the reason of the most general format that has MTP
        raise


def _keeps_rejected() -> bool:
    """True if the installed vLLM is for CPUs and does not undo rejected drafts in Mamba-2 states (as in 0.32)."""
    try:
        on_cpu = metadata.version("vllm").endswith("cpu")
    except metadata.PackageNotFoundError:
        return False
    file = Path(module_folder("vllm.model_executor.layers.mamba.ops.cpu")) / "causal_conv1d.py"
    return on_cpu and file.is_file() and "num_accepted_tokens" not in file.read_text()


def _precision(folder: Path) -> dict[str, Any]:
    """Return vLLM's argument for an FP8 KV cache, if a quantised checkpoint has one; other types are in config.json."""
    file = folder / "hf_quant_config.json"
    held = read_json(file) if file.is_file() else {}
    low = str((held.get("quantization") or {}).get("kv_cache_quant_algo") or "").upper() == "FP8"
    return {"kv_cache_dtype": "fp8"} if low else {}


def parsers(template: str | Path) -> dict[str, Any]:
    """Return vLLM arguments that select the parsers for reasoning and tool calls, by chat template (name or folder)."""
    try:
        text = Template.load(template).source
    except ValueError:
        return {}
    found: dict[str, Any] = {}
    style = next((parser for mark, parser in _STYLES.items() if mark in text), None)
    if style is not None:
        found |= {"enable_auto_tool_choice": True, "tool_call_parser": style}
    if "<think>" in text:
        found["reasoning_parser"] = _REASONING.get(style or "", _OTHER_REASONING)
    return found


@contextmanager
def running(words: list[str], key: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run vLLM in a process until the end of the block; `words` is its command line.

    Raises:
        ValueError: vLLM is not installed.
    """
    program = Path(sys.executable).parent / "vllm"
    found = str(program) if program.exists() else shutil.which("vllm")
    if found is None:
        raise ValueError("serving.engine=vllm requires vLLM: pip install vllm, or set serving.engine=transformers")
    process = subprocess.Popen(
        [found, *words[1:]],
        env={**os.environ, **({KEY: key} if key is not None else {})},
        start_new_session=True,  # Ctrl-C is forwarded below
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )
    try:
        yield process
    finally:
        end(process, _SECONDS_TO_STOP, signal.SIGINT)


def wait_until_up(process: subprocess.Popen[bytes], url: str, key: str | None) -> None:
    """Wait until vLLM answers at a URL.

    Raises:
        Ended: vLLM has ended before it answered.
    """
    while not answers(f"{url}/models", key):
        if process.poll() is not None:
            raise Ended(
                f"vllm serve ended with exit code {process.returncode} before it answered; see its output above"
            )
        time.sleep(0.5)


def answers(url: str, key: str | None) -> bool:
    """True if a GET request to the URL returns status 200."""
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
