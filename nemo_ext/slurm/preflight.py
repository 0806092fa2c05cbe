"""Checks that find a job's errors before it waits in a queue. No torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from nemo_ext.architecture.cost import GpuCost, per_gpu
from nemo_ext.architecture.gpus import GPUS
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.checkpoint.beside import is_hugging_face
from nemo_ext.checkpoint.start import as_checkpoint, with_model_of_start
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.phases import plan_of
from nemo_ext.data.streams import blend_to_tokenize
from nemo_ext.data.text.tokenizers import check_vocabulary, load_tokenizer
from nemo_ext.data.training import data_sections, with_data
from nemo_ext.job.files import no_room
from nemo_ext.job.settings import nearest
from nemo_ext.megatron import packed_attention
from nemo_ext.megatron.fp8 import Precision, check_experts
from nemo_ext.serving.settings import LOOPBACK
from nemo_ext.slurm.cluster import Cluster, Limit, call, duration
from nemo_ext.slurm.jobs import (
    MEANWHILE,
    MODELS,
    ON_TRAINING_CONFIG,
    SERVING,
    checkpoints_of,
    inputs,
    makes,
    nodes_and_gpus,
    record_of,
)
from nemo_ext.slurm.settings import SHARDED, Settings

GIB = 1 << 30
SETTINGS = {
    "tokenize": ("nemo_ext.data.streams", "blend_to_tokenize"),
    "curate": ("nemo_ext.data.curation.job", "check"),
    "mixture": ("nemo_ext.mixture.job", "check"),
    "curate_classifier": ("nemo_ext.data.curation.training", "check"),
    "train_tokenizer": ("nemo_ext.data.vocabulary.job", "check"),
    "sft_data": ("nemo_ext.data.sft.settings", "read_settings"),
    "preference_data": ("nemo_ext.data.preference.job", "settings"),
    "curriculum": ("nemo_ext.data.curriculum.job", "settings"),
    "quantize": ("nemo_ext.quantization.settings", "read_settings"),
    "sensitivity": ("nemo_ext.sensitivity.settings", "read_settings"),
    "serve": ("nemo_ext.serving.model", "checked_settings"),
    "generate": ("nemo_ext.generate.job", "check"),
    "synthesize": ("nemo_ext.synthesis.job", "check"),
    "evaluate": ("nemo_ext.evaluation.job", "check"),
    "rollouts": ("nemo_ext.evaluation.rollouts", "check"),
    "online": ("nemo_ext.online.job", "check"),
    "merge_sweep": ("nemo_ext.evaluation.merges", "check"),
    "puzzle": ("nemo_ext.puzzle.job", "check"),
    "train": ("nemo_ext.evaluation.live", "check"),
}
"""Module and function that read each job's settings."""
_STARTS = {"puzzle": ("puzzle", "parent"), "sensitivity": ("sensitivity", "model")}
"""Section and key of the checkpoint whose model a job works on, by job."""
RUNS = {"mixture": ("nemo_ext.mixture.settings", "runs_of")}
"""Module and function that say what other jobs a job starts, with their configs."""
TIGHT = 0.9
"""Share of a GPU's memory above which a warning says that fragments and buffers may not fit."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
MEMORY = "memory: "
"""Beginning of findings on the memory of GPUs."""
ADVICE = "raise tensor, pipeline or context parallelism, or set megatron.recompute_granularity"


@dataclass(frozen=True, slots=True)
class Finding:
    """One error, warning or note, in one line with the remedy."""

    kind: Literal["error", "warning", "note"]
    text: str


def findings(
    config: Mapping[str, Any],
    settings: Settings,
    *,
    paths: bool = True,
    coming: Sequence[Path] = (),
    model_to_come: Mapping[str, Any] | None = None,
    here: bool = False,
) -> list[Finding]:
    """All findings on a job; errors would make it fail.

    Args:
        config: composed config of the job.
        settings: settings of site and queue.
        paths: if False, skip the checks of files, as for a table of recipes and sites.
        coming: paths that earlier jobs write and that need not exist yet.
        model_to_come: config.json of the policy that they make; None if unknown.
        here: True for a job that is not queued but started on this machine.
    """
    cluster = settings.cluster
    if settings.job == "train":
        config = with_model_of_start(config)
    section, key = _STARTS.get(settings.job, ("", ""))
    if section and (place := config[section].get(key)) and Path(str(place)).exists():
        with suppress(ValueError):  # the job's own check says what is wrong
            config = as_checkpoint(config, Path(str(place)))
    found = [] if here else [*_queue(config, settings)]
    if settings.job == "train":
        found += [*_memory(config, cluster), *_precision(config, cluster)]
    if settings.job == "rl":
        found += [*_reinforcement(config, settings, model_to_come, rehearsed=paths), *_precision(config, cluster)]
    if settings.job in SETTINGS:
        found += [*_settings(settings.job, config, coming)]
    if paths:
        said = [one.text for one in found]
        found += [one for one in _inputs(config, settings, coming) if not any(text in one.text for text in said)]
        found += _container(cluster)
        if settings.job == "train" and not here:
            found += _packs(config, cluster)
    if paths and settings.job in ON_TRAINING_CONFIG:
        found += [*_data(config, coming, tokenised=settings.job == "train" and not here), *_offline(config, cluster)]
    if paths and settings.job in ON_TRAINING_CONFIG and not _tokenizer_missing(found):
        found += _tokenizers(config, coming)
    if not errors(found):
        for job, part in started(settings.job, config):
            ours = findings(
                part,
                replace(settings, job=job, slurm=replace(settings.slurm, folder=None, shards=1)),
                paths=paths,
                coming=[*coming, *makes(settings.job, config)],
                here=True,
            )
            found += [one for one in ours if one not in found]
    if paths and settings.job in ("puzzle", "sensitivity") and not coming and not errors(found):
        try:
            with_data(config)
        except ValueError as error:
            found.append(Finding("error", str(error)))
    return found


def started(job: str, config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Other jobs that a job starts, with their composed configs."""
    if job not in RUNS:
        return []
    module, name = RUNS[job]
    found: list[tuple[str, Mapping[str, Any]]] = getattr(import_module(module), name)(config)
    return found


def errors(found: Sequence[Finding]) -> bool:
    """True if any finding is an error."""
    return any(one.kind == "error" for one in found)


def _tokenizer_missing(found: Sequence[Finding]) -> bool:
    """True if a finding says that the tokenizer is missing."""
    return any(one.text.startswith("data.tokenizer: ") for one in found)


def other_tokenizers(config: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Errors for streams that an earlier stage tokenises with another tokenizer than training uses.

    Args:
        config: config of training.
        before: configs of the earlier tokenize stages.
    """
    for made in before:
        prefixes = {place.resolve() for place in makes("tokenize", made)}
        for data in data_sections(config):
            if not (data.get("blend") or data.get("streams")) or not isinstance(data.get("tokenizer"), Mapping):
                continue
            shared = [leaf.name for leaf in read_tree(data).leaves() if leaf.prefix.resolve() in prefixes]
            wanted = blend_to_tokenize(made)["tokenizer"]
            assert isinstance(wanted, Mapping)
            try:
                same = load_tokenizer(wanted).identity == load_tokenizer(data["tokenizer"]).identity
            except ValueError:
                continue  # reported by `findings` of either stage
            if shared and not same:
                yield Finding(
                    "error",
                    f"data.tokenizer={dict(data['tokenizer'])}: {shared[0]} is tokenised by {wanted} in a stage before "
                    "this one: give both stages one tokenizer",
                )


def _tokenizers(config: Mapping[str, Any], coming: Sequence[Path]) -> Iterator[Finding]:
    """Errors for a tokenizer that cannot be read or has more ids than the model."""
    for data in data_sections(config):
        tokenizer = data.get("tokenizer")
        if not isinstance(tokenizer, Mapping):
            if tokenizer is not None or data.get("blend") or data.get("streams"):
                yield Finding("error", f"data.tokenizer must be a mapping such as {{kind: byte}}, not {tokenizer!r}")
            continue
        place = Path(str(tokenizer.get("path") or ".")).expanduser()
        if not place.exists() and is_there(place, coming):
            continue
        try:
            check_vocabulary(load_tokenizer(tokenizer).vocab_size, config)
        except ValueError as error:
            yield Finding("error", f"data.tokenizer: {error}")


def is_there(path: Path, coming: Sequence[Path]) -> bool:
    """True if a file or folder exists or an earlier job writes it."""
    return path.exists() or _is_made(path, coming)


def _is_made(path: Path, coming: Sequence[Path]) -> bool:
    """True if an earlier job writes a file or folder."""
    given = path.resolve()

    def made_at(place: Path) -> bool:
        # A folder is there with its first file; tokenised files are named by their prefix.
        prefixed = given.parent == place.parent and given.name.startswith(f"{place.name}_")
        return prefixed or given.is_relative_to(place) or place.is_relative_to(given)

    return any(made_at(place.resolve()) for place in coming)


def _queue(config: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    cluster, job = settings.cluster, settings.job
    nodes, gpus = nodes_and_gpus(job, config, settings)
    serves = job in (*SERVING, *MEANWHILE)
    key = "launcher.nodes" if job in ON_TRAINING_CONFIG else "serving.nodes" if serves else "slurm.nodes"
    if cluster.node is not None and gpus > cluster.node.gpus:
        advice = f" and launcher.nodes to {-(-nodes * gpus // cluster.node.gpus)}" if job in ("train", "puzzle") else ""
        yield Finding(
            "error",
            f"{'serving.gpus' if serves else 'launcher.nproc_per_node'}={gpus}: a node of {cluster.name} has "
            f"{cluster.node.gpus} GPUs; set it to {cluster.node.gpus}{advice}",
        )
    elif cluster.node is not None and 0 < gpus < cluster.node.gpus:
        yield Finding("note", f"{gpus} of {cluster.node.gpus} GPUs of a node")
    limit = cluster.limit
    if cluster.qos is not None and cluster.limits and limit is None:
        yield Finding("error", f"cluster.qos={cluster.qos}: {nearest(cluster.qos, cluster.limits)}")
        return
    if limit is None:
        yield Finding("note", f"cluster={cluster.name}: nothing is known of its limits and GPUs")
        return
    if limit.nodes is not None and nodes > limit.nodes:
        larger = [name for name, other in cluster.limits.items() if other.nodes is None or other.nodes >= nodes]
        yield Finding("error", f"{key}={nodes}: {_qos(cluster)} allows {limit.nodes} nodes; {_instead(larger)}")
    if settings.time is not None and duration(settings.time) > duration(limit.time):
        longer = [name for name, other in cluster.limits.items() if _allows(other, settings.time, nodes)]
        yield Finding("error", f"time={settings.time}: {_qos(cluster)} allows {limit.time}; {_instead(longer)}")


def unknown_to_slurm(settings: Settings) -> Iterator[Finding]:
    """Errors for partitions and a quality of service that the site's own Slurm does not have, as far as it says."""
    asked = {
        "partition": ["sinfo", "--all", "--noheader", "--format=%R"],
        "qos": ["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name"],
    }
    for key, command in asked.items():
        given = getattr(settings.cluster, key)
        known = call(command).stdout.split() if given is not None and shutil.which(command[0]) else []
        for name in (given or "").split(",") if known else ():
            if name not in known:
                yield Finding("error", f"cluster.{key}={name}: Slurm has none of that name: {nearest(name, known)}")


def _memory(config: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    launcher, node = config["launcher"], cluster.node
    world = int(launcher["nodes"]) * int(launcher["nproc_per_node"])
    try:
        most = max(_gpus(config, world), key=lambda gpu: gpu.total_bytes)
    except ValueError as error:
        yield Finding("error", str(error))
        return
    if node is None or node.gpu_memory_gib is None:
        return
    kind = fits(most.total_bytes / (node.gpu_memory_gib * GIB))
    need = f"{MEMORY}about {most.total_bytes / GIB:.0f} GiB of the {node.gpu_memory_gib:g} of a {node.gpu}"
    if kind == "error":
        need += (
            f" (weights, gradients and optimizer {(most.total_bytes - most.activation_bytes) / GIB:.0f}, "
            f"activations {most.activation_bytes / GIB:.0f}): {ADVICE}"
        )
    yield Finding(kind, need)


def fits(share: float) -> Literal["error", "warning", "note"]:
    """Kind of a finding on a share of a GPU's memory."""
    return "error" if share > 1 else "warning" if share > TIGHT else "note"


def _gpus(config: Mapping[str, Any], world: int) -> Sequence[GpuCost]:
    from nemo_ext.megatron.arguments import pattern_with_cuts

    config = {**config, "model": {**config["model"], "pattern": pattern_with_cuts(config)}}
    architecture = Architecture.from_config(config)
    layout = Layout.from_config(config, world_size=world)
    plan = plan_of(config)
    # With phases the longest sequences need the most memory.
    length = max(phase.seq_length for phase in plan.phases) if plan else int(config["megatron"]["seq_length"])
    return per_gpu(replace(architecture, seq_length=length), layout, seq_length=length)


def _precision(config: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    node, flags, given = cluster.node, config["megatron"], config.get("precision_plan")
    plan = None if given is None else Plan.from_config(given)
    if node is None:
        return
    if plan is not None and plan.uses_fp8:
        key, recipe = "precision_plan", plan.recipe
    elif asked := [name for name in ("fp8", "fp8_format", "fp8_recipe", "fp4") if flags.get(name)]:
        key, recipe = f"megatron.{asked[0]}", str(flags.get("fp8_recipe") or "delayed")
    else:
        return
    if not node.fp8:
        yield Finding("error", f"{key}: a {node.gpu} has no FP8; train in bf16 (precision=bf16) there")
    elif plan is not None:
        try:
            check_experts(Precision(plan, Architecture.from_config(config)))
        except ValueError as error:
            yield Finding("error", str(error))
    if node.fp8 and recipe not in node.fp8:
        yield Finding("error", f"{key}: a {node.gpu} has no {recipe} scaling; it has {', '.join(node.fp8)}")


def _packs(config: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Packs without an attention kernel for the site's GPUs; a warning where a container has the packages."""
    if cluster.node is None or config["model"].get("backend") == "local":
        return
    inside = cluster.container.used
    why = packed_attention.lack(
        config,
        cluster.node.gpu,
        capability=GPUS[cluster.node.gpu].capability if cluster.node.gpu in GPUS else None,
        flash=not inside and packed_attention.installed("flash-attn") is not None,
        version=None if inside else packed_attention.installed("transformer-engine"),
    )
    if why:
        yield Finding("warning", f"unless the image has flash-attn: {why}") if inside else Finding("error", why)


def _reinforcement(
    config: Mapping[str, Any], settings: Settings, model_to_come: Mapping[str, Any] | None, *, rehearsed: bool
) -> Iterator[Finding]:
    """Errors for inconsistent algorithm settings, a missing engine, or what NeMo-RL would refuse."""
    from nemo_ext.rl.job import check_steps, checked_algorithm, over_own_pairs
    from nemo_ext.rl.trl.render import check_arguments

    on_nemo_rl, algorithm = config["engine"] == "nemo_rl", None
    try:
        algorithm = checked_algorithm(config)
        check_steps(config, algorithm)
        if not on_nemo_rl and config["trl"] and find_spec("trl") is not None:
            check_arguments(algorithm, config["trl"])
    except ValueError as error:
        yield Finding("error", str(error))
    if on_nemo_rl and not os.environ.get("NEMO_RL_ROOT") and find_spec("nemo_rl") is None:
        yield Finding("error", "engine=nemo_rl: NEMO_RL_ROOT is not set: name a checkout (docs/rl/nemo_rl.md)")
    elif on_nemo_rl and rehearsed and algorithm is not None and settings.cluster.node is not None:
        there = Path(str(config["policy"])).expanduser().is_dir()
        if not there and model_to_come is None:
            yield Finding("note", "the layout is computed and checked when the job starts: the model is not there yet")
            return
        with nullcontext() if there else TemporaryDirectory() as folder:
            if folder is not None:
                (Path(folder) / "config.json").write_text(json.dumps(model_to_come), encoding="utf-8")
                config = {**config, "policy": folder}
            try:
                if all(place.exists() for key, place, _ in inputs("rl", config) if key == "pairs.train"):
                    algorithm = over_own_pairs(config, algorithm)  # else they are made before, or `_inputs` says so
                yield from _on_nemo_rl(config, algorithm, settings)
            except ValueError as error:
                yield Finding("error", str(error))


def _on_nemo_rl(config: Mapping[str, Any], algorithm: Any, settings: Settings) -> Iterator[Finding]:
    """Findings of NeMo-RL's own `setup`, where it can be imported, with the config that the job will have.

    Raises:
        ValueError: the config cannot be made, or no layout fits.
    """
    from nemo_ext.rl.nemo_rl.checkout import Checkout
    from nemo_ext.rl.nemo_rl.draft import section_of
    from nemo_ext.rl.nemo_rl.job import on_cluster, settings_of

    node, nodes = settings.cluster.node, settings.slurm.nodes
    assert node is not None
    checkout = Checkout(os.environ.get("NEMO_RL_ROOT"))
    given = on_cluster(config, nodes, node.gpus, node.gpu_memory_gib)
    made = {"section": section_of(algorithm), "config": settings_of(given, algorithm, checkout)[1]}
    code, said = rehearsal(made, checkout.root)
    if code == 0:
        yield Finding("note", "NeMo-RL's own setup takes the config")
    else:
        kind: Literal["error", "note"] = "error" if code == 1 else "note"
        yield Finding(kind, said if code == 1 else f"NeMo-RL's own setup was not asked: {said}")


def rehearsal(made: Mapping[str, Any], root: Path) -> tuple[int, str]:
    """Exit code and last line of `nemo_ext.rl.nemo_rl.rehearsal`, in a process that imports torch and NeMo-RL."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(made), encoding="utf-8")
        path = os.pathsep.join([str(root), *(place for place in sys.path if place)])
        ended = subprocess.run(
            [sys.executable, "-m", "nemo_ext.rl.nemo_rl.rehearsal", str(file)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (ended.stdout.strip() or ended.stderr.strip() or "it said nothing").splitlines()
    return (ended.returncode if ended.stdout.strip() or not ended.returncode else 3), lines[-1]


def _settings(job: str, config: Mapping[str, Any], coming: Sequence[Path]) -> Iterator[Finding]:
    """The error that a job would raise on its settings before it reads anything."""
    module, name = SETTINGS[job]
    more: dict[str, bool] = {}
    if job == "serve" and config["serving"]["host"] in LOOPBACK:
        config = {**config, "serving": {**config["serving"], "host": "NODE"}}  # as the task will have it
    if job in SHARDED:
        more["files"] = not coming
    if job == "online":
        more["tasks"] = all(path.exists() for _, path, _ in inputs(job, config))  # else `_inputs` says so
    if job == "merge_sweep":
        more["megatron"] = not coming
    if job == "preference_data":
        tokenizer = config["tokenizer"]
        named = [tokenizer.get("path") if isinstance(tokenizer, Mapping) else None, config["template"]]
        made = [Path(str(name)).expanduser() for name in named if name]
        more["files"] = all(path.exists() or not is_there(path, coming) for path in made)
    for key in ("replicas", "nodes") if job in MEANWHILE else ():
        if (number := config["serving"][key]) != 1:
            yield Finding(
                "error",
                f"serving.{key}={number}: job={job} serves its models on its own node, one at a time: leave it at 1; "
                "serving.gpus gives a model more GPUs (serving.engine=vllm)",
            )
    error = None
    with redirect_stderr(StringIO()) as notices:
        try:
            getattr(import_module(module), name)(config, **more)
        except ValueError as raised:
            error = Finding("error", str(raised))
    yield from (Finding("note", line) for line in notices.getvalue().splitlines() if line.strip())
    if error is not None:
        yield error


def _data(config: Mapping[str, Any], coming: Sequence[Path], *, tokenised: bool) -> Iterator[Finding]:
    for data in data_sections(config):
        if packed := data.get("packed"):
            needed = [Path(f"{place}.idx") for place in packed.values() if place]
            how = "`nemo-ext sft_data` writes it"
        elif data.get("blend") or data.get("streams"):
            leaves = read_tree(data).leaves()
            # A job on one machine tokenises streams that have a source; training on Slurm does not.
            needed = [Path(f"{leaf.prefix}_train.idx") for leaf in leaves if tokenised or not leaf.source]
            how = "`nemo-ext tokenize` writes it"
        else:
            continue
        missing = [place for place in needed if not is_there(place, coming)]
        if missing:
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            yield Finding("error", f"data: {missing[0]}{more} not there; {how}")


def _inputs(config: Mapping[str, Any], settings: Settings, coming: Sequence[Path]) -> Iterator[Finding]:
    for key, path, how in inputs(settings.job, config):
        if not is_there(path, coming):
            yield Finding("error", f"{key}={path}: not there; {how}")
        elif _is_made(path, coming):
            continue
        elif key in MODELS:
            if wrong := _no_checkpoint(key, path):
                yield Finding("error", f"{key}={path}: {wrong}")
        elif path.is_dir() and not any(path.iterdir()):
            yield Finding("error", f"{key}={path}: is an empty folder; {how}")
    record = record_of(settings.job, config, settings)
    if any(character == "\\" or not character.isprintable() for character in str(record.resolve())):
        yield Finding(
            "error",
            f"run_dir={str(record)!r}: sbatch cannot open an output below it, as its path has a backslash, a line "
            "break or another control character; choose another",
        )
        return
    above = next(place for place in (record.resolve(), *record.resolve().parents) if place.exists())
    try:
        # Not os.access: for root it reports even /proc and read-only mounts as writable.
        with TemporaryDirectory(prefix=".nemo_ext-", dir=above):
            pass
    except OSError as error:
        yield Finding("error", f"run_dir={record}: {error.strerror} in {above}; choose a directory that can be written")
        return
    if room := no_room(above):
        yield Finding("error", f"run_dir={record}: {room}: make room, or choose another disk")
    if settings.job != "train" or not config["megatron"].get("train_iters"):
        return
    (count, size), free = checkpoints_of(config), shutil.disk_usage(above).free
    if free < size * count:
        has = f"run_dir={record}: {above} has {free / 1e9:,.1f} GB"
        one = f"a checkpoint takes about {size / 1e9:,.1f} GB, and {count:,} are kept"
        yield Finding("error" if free < size else "warning", f"{has}; {one}: make room, or choose another disk")


def _no_checkpoint(key: str, path: Path) -> str:
    """Reason why a model's folder holds no checkpoint that the key takes; "" if it holds one."""
    if not is_hugging_face(path):
        try:
            checkpoint_folder(path)
        except CheckpointError as error:
            return str(error).removeprefix(f"{path}: ")
    elif key.startswith("megatron."):
        return "is a Hugging Face checkpoint: `nemo-ext convert` writes one of Megatron"
    elif not any(file.suffix in _WEIGHTS for file in path.iterdir()):
        return f"has a config.json and no weights ({', '.join(_WEIGHTS)}): copy it again"
    return ""


def _container(cluster: Cluster) -> Iterator[Finding]:
    container = cluster.container
    if not container.used:
        if cluster.name != "generic" and container.runtime != "none":
            yield Finding("note", "cluster.container.image=null: ranks run in the Python that submits")
        return
    image = str(container.image)
    if container.runtime != "pyxis" and shutil.which(container.runtime) is None:
        yield Finding("error", f"cluster.container.runtime={container.runtime}: not on PATH; load its module")
    if image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh")):
        if not Path(image).exists():
            yield Finding("error", f"cluster.container.image={image}: no such file")
    elif not cluster.internet:
        yield Finding("error", f"cluster.container.image={image}: compute nodes reach no registry; pull it to a file")
    unset = [place for place in container.binds if os.path.expandvars(place).startswith("$")]
    if unset:
        yield Finding("note", f"cluster.container.binds: {', '.join(unset)} not set here, so not bound")
    if absent := [place for place in cluster.binds() if not Path(place.partition(":")[0]).exists()]:
        places = ", ".join(absent)
        yield Finding("warning", f"cluster.container.binds: {places} not here; starts fail on nodes without")


def _offline(config: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """An error for a tokenizer that is missing, or not in the cache of nodes without internet."""
    if cluster.internet:
        return
    tokenizer = (config.get("data") or {}).get("tokenizer")
    name = tokenizer.get("path") if isinstance(tokenizer, Mapping) else tokenizer
    if not name or Path(str(name)).exists():
        return
    if str(name).count("/") != 1 or str(name).startswith((".", "~", "/")):
        yield Finding("error", f"data.tokenizer: {name}: no such folder")
        return
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    if not (hub.expanduser() / f"models--{str(name).replace('/', '--')}").is_dir():
        yield Finding(
            "error",
            f"data.tokenizer: {name} is no folder and not in {hub}: compute nodes have no internet; "
            f"download it here first (hf download {name})",
        )


def _allows(limit: Limit, time: str, nodes: int) -> bool:
    return duration(time) <= duration(limit.time) and (limit.nodes is None or nodes <= limit.nodes)


def _qos(cluster: Cluster) -> str:
    return f"the quality of service {cluster.qos or next(iter(cluster.limits))} of {cluster.name}"


def _instead(names: Sequence[str]) -> str:
    return f"cluster.qos={names[0]} does" if names else "no other one of this site does"
