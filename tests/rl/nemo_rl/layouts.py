"""Layouts of all presets on NeMo-RL: the table of docs/rl/presets.md.

NEMO_RL_ROOT=CHECKOUT PYTHONPATH=CHECKOUT python tests/rl/nemo_rl/layouts.py      # writes the column of this version
"""

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import algorithm_of, presets
from nemo_ext.rl.nemo_rl import layout
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.draft import section_of
from nemo_ext.rl.nemo_rl.job import settings_of
from nemo_ext.rl.nemo_rl.rehearsal import rehearse

PAGE = Path(__file__).parents[3] / "docs" / "rl" / "presets.md"
VERSIONS = ("0.7.0", "main")
BACKENDS = ("megatron", "dtensor")


@dataclass(frozen=True)
class Place:
    """Model and cluster of a preset; a cluster on which the model fits if the paper states none."""

    model: str
    nodes: int
    gpus: int
    memory: float


NANO = Place("nemotron3_nano_30b", 16, 8, 80)
PLACES = {
    "domyn_math_grpo": Place("domyn_small_10b", 16, 4, 64),
    "domyn_multi_env_grpo": Place("domyn_small_10b", 80, 4, 64),
    "dpo_delta": Place("domyn_small_10b", 8, 4, 64),
    "dpo_tool_hallucination": NANO,
    "genrm_training": NANO,
    "llama_nemotron_grpo": Place("llama_nemotron_ultra_253b", 72, 8, 80),
    "llama_nemotron_rlhf": Place("llama_nemotron_ultra_253b", 72, 8, 80),
    "logit_distillation": Place("olmo3_7b", 4, 8, 80),
    "mopd": Place("nemotron3_nano_30b", 33, 8, 80),
    "nemotron3_rlhf": NANO,
    "nemotron3_rlvr": NANO,
    "olmo_rl": Place("olmo3_7b", 8, 8, 80),
    "opd": Place("olmo3_7b", 5, 8, 80),
    "rl_zero": Place("olmo3_7b", 4, 8, 80),
    "rloo_if": Place("llama_nemotron_super_49b", 8, 8, 80),
    "rpo_offline": Place("llama_nemotron_nano_8b", 2, 8, 80),
    "rpo_online": Place("llama_nemotron_super_49b", 8, 8, 80),
    "think_dpo": Place("olmo3_7b", 4, 8, 80),
    "tulu_dpo": Place("olmo1_7b", 2, 8, 80),
}

_JUDGE = ("rl.environments.judge.settings.judge",)
JUDGES = {
    **dict.fromkeys(("llama_nemotron_grpo", "olmo_rl"), _JUDGE),
    "nemotron3_rlvr": (*_JUDGE, "rl.environments.graded.settings.judge"),
    **dict.fromkeys(("llama_nemotron_rlhf", "nemotron3_rlhf"), ("rl.group.judge",)),
}
"""Where a preset asks for a judge's endpoint."""


def version(checkout: Checkout) -> str:
    """Column of a checkout in the table."""
    return "main" if checkout.keys("grpo").missing("grpo.val_num_generations_per_prompt") is None else "0.7.0"


@cache
def folder(model: str, below: Path) -> Path:
    """Hugging Face folder of a model without weights."""
    made = below / model
    made.mkdir()
    found, config = choose(from_config(compose("describe", [f"model={model}"])))
    (made / "config.json").write_text(json.dumps(config))
    for name in found.code:
        (made / name).write_text((files("nemo_ext.checkpoint") / "remote_code" / name).read_text(encoding="utf-8"))
    return made


def words(preset: str, backend: str, below: Path) -> list[str]:
    """Command line words of a preset with its model and cluster."""
    place = PLACES[preset]
    stated = preset in layout.names() and layout.load(preset).backend == backend
    sizes = [f"nemo_rl.set.cluster.num_nodes={place.nodes}", f"nemo_rl.set.cluster.gpus_per_node={place.gpus}"]
    return [
        *(f"preset={preset}", "engine=nemo_rl", f"nemo_rl.backend={backend}", "on_inexpressible=warn"),
        *(f"model={folder(place.model, below)}", f"run_dir={below / 'run'}", f"nemo_rl.gpu_memory_gib={place.memory}"),
        *([f"nemo_rl.layout={preset}"] if stated else []),
        *sizes,
        *(f"{path}.{key}=x" for path in JUDGES.get(preset, ()) for key in ("endpoint", "model")),
        *(["rl.distillation.teachers.default=x", "rl.asynchronous={max_age: 1}"] if preset in ("opd", "mopd") else []),
        # Its setup reads the teacher's config.
        *([f"rl.distillation.teachers.default={folder(place.model, below)}"] if preset == "logit_distillation" else []),
        *(["precision=fp8_blockwise"] if place.model == "llama_nemotron_ultra_253b" else []),
    ]


def rendered(checkout: Checkout, preset: str, backend: str, below: Path) -> tuple[dict[str, Any], Any]:
    """Master config and algorithm of a preset with its model and cluster."""
    config = compose("rl", words(preset, backend, below))
    given = OmegaConf.to_container(OmegaConf.create(config["rl"]))
    if "prompts_per_step" in given and not (given.get("schedule") or {}).get("epochs"):
        given["schedule"] = {"kind": "constant", **(given.get("schedule") or {}), "steps": 100}
    if preset == "domyn_multi_env_grpo":
        given["schedule"] |= {"steps": 100, "epochs": None}
    algorithm = algorithm_of(given, where="rl")
    return settings_of(config, algorithm, checkout)[1], algorithm


def outcome(checkout: Checkout, preset: str, backend: str, below: Path) -> tuple[str, str]:
    """Layout of a preset, and whether NeMo-RL accepts it: "yes", or the reason."""
    try:
        master, algorithm = rendered(checkout, preset, backend, below)
    except ValueError as error:
        needed = re.search(r"needs about (\d+ GiB)", str(error))
        return (f"none fits ({needed[1]} per GPU)", "no") if needed else ("none", f"no: {error}")
    try:
        rehearse(master, section_of(algorithm))
    except ValueError as error:
        if "only the Megatron backend is supported for teachers" in str(error):
            return "none fits (teachers require megatron)", "no"
        return told(master, backend), f"no: {error}"
    return told(master, backend), "yes"


def told(master: dict[str, Any], backend: str) -> str:
    """Short description of the layout in a master config."""
    policy = master["policy"]
    section, sizes = policy["megatron_cfg" if backend == "megatron" else "dtensor_cfg"], layout._PARALLEL[backend]
    value = {key: section[path.rpartition(".")[2]] for key, path in sizes.items()}
    short = {"TP": "tensor_parallel", "PP": "pipeline_parallel", "CP": "context_parallel", "EP": "expert_parallel"}
    parts = [f"{name}{value[key]}" for name, key in short.items() if value.get(key, 1) > 1]
    cluster, generation = master["cluster"], policy.get("generation")
    gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
    teachers = set((master.get("on_policy_distillation") or {}).get("teacher_model_by_agent_name", {}).values())
    gpus -= len(teachers) * cluster["gpus_per_node"]
    own = 0
    if generation and not generation["colocated"]["enabled"]:
        resources = generation["colocated"]["resources"]
        own = resources["num_nodes"] * resources["gpus_per_node"]
    line = f"{' '.join(parts) or 'data parallel'} on {gpus - own}, micro {policy['train_micro_batch_size']}"
    line += ", recompute" if value["recompute"] else ""
    if generation:
        tensor = generation["vllm_cfg"]["tensor_parallel_size"]
        line += f"; vLLM TP{tensor} on {own or 'the same'}"
    line += f"; {len(teachers)} x {cluster['gpus_per_node']} for teachers" if teachers else ""
    return line


def outcomes(checkout: Checkout, below: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Layout and outcome by preset and backend."""
    return {
        (preset, backend): outcome(checkout, preset, backend, below) for preset in presets() for backend in BACKENDS
    }


_ROW = re.compile(r"^\| (\w+) \| (\w+), [^|]+ \| (megatron|dtensor) \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", re.M)


def on_page() -> dict[tuple[str, str], tuple[str, dict[str, str]]]:
    """Layout and outcomes by version on the page, by preset and backend."""
    found = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {(row[0], row[2]): (row[3].strip(), dict(zip(VERSIONS, row[4:], strict=True))) for row in found}


def main() -> None:
    """Write the column of the version in NEMO_RL_ROOT."""
    checkout, before = Checkout(os.environ["NEMO_RL_ROOT"]), on_page()
    with TemporaryDirectory() as below:
        found = outcomes(checkout, Path(below))
    lines = []
    for (preset, backend), (line, said) in found.items():
        place, versions = PLACES[preset], before.get((preset, backend), ("", {}))[1] | {version(checkout): said}
        where = f"{place.model}, {place.nodes} x {place.gpus} of {place.memory} GiB"
        cells = [preset, where, backend, line, *(versions.get(name, "") for name in VERSIONS)]
        lines.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8")
    head = re.search(r"^\| preset \| model and cluster .*\n\|[-|]+\|\n", text, re.M)
    assert head is not None
    PAGE.write_text(text[: head.end()] + "\n".join(lines) + "\n" + _ROW.sub("", text[head.end() :]).lstrip("\n"))


if __name__ == "__main__":
    main()
