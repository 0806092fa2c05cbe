"""Checks that find a job's errors before it is queued. Does not import torch."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_ext.checkpoint.beside import is_hugging_face
from nemo_ext.checkpoint.start import as_checkpoint, model_of_start
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.streams import blend_to_tokenize
from nemo_ext.data.text.tokenizers import check_vocabulary, load_tokenizer
from nemo_ext.data.training import data_sections, with_data
from nemo_ext.job.files import no_room
from nemo_ext.job.findings import Finding, errors
from nemo_ext.job.job import Job, at, invoke, is_coming, will_exist
from nemo_ext.job.registry import job as find
from nemo_ext.job.settings import nearest
from nemo_ext.slurm.cluster import Cluster, call, duration
from nemo_ext.slurm.jobs import checkpoints_of, makes, nodes_and_gpus, record_of
from nemo_ext.slurm.settings import Settings

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def findings(
    config: Mapping[str, Any],
    settings: Settings,
    *,
    paths: bool = True,
    coming: Sequence[Path] = (),
    model_to_come: Mapping[str, Any] | None = None,
    here: bool = False,
) -> list[Finding]:
    """Check a job and return all findings; a finding of the kind `error` means that the job would fail.

    Args:
        paths: whether to check files; False for a table of recipes and sites.
        coming: paths that earlier jobs will write, so that they need not exist yet.
        model_to_come: config.json of the policy that earlier jobs will write; None if unknown.
        here: whether the job is started on this machine rather than queued.
    """
    cluster, job = settings.cluster, find(settings.job)
    if job.ranks == "slurm":
        config = {**config, **model_of_start(config)}
    if (place := at(config, job.model.start)) and Path(str(place)).exists():
        with suppress(ValueError):  # the job's own check reports the error
            config = as_checkpoint(config, Path(str(place)))
    collected = [] if here else [*_queue(config, settings)]
    if job.findings is not None:
        collected += invoke(job.findings, config, settings, paths=paths, here=here, model_to_come=model_to_come)
    collected += _settings(job, config, coming)
    if paths:
        messages = [finding.text for finding in collected]
        collected += [
            finding
            for finding in _inputs(config, settings, coming)
            if not any(text in finding.text for text in messages)
        ]
        collected += _container(cluster)
    if paths and job.training:
        tokenised = job.ranks == "slurm" and not here
        collected += [*_data(config, coming, tokenised=tokenised), *_offline(config, cluster)]
    if paths and job.training and not any(finding.text.startswith("data.tokenizer: ") for finding in collected):
        collected += _tokenizers(config, coming)
    if not errors(collected):
        for name, part in started(settings.job, config):
            further = findings(
                part,
                replace(settings, job=name, slurm=replace(settings.slurm, folder=None, shards=1)),
                paths=paths,
                coming=[*coming, *makes(settings.job, config)],
                here=True,
            )
            collected += [finding for finding in further if finding not in collected]
    if paths and job.training and job.ranks != "slurm" and not coming and not errors(collected):
        try:
            with_data(config)
        except ValueError as error:
            collected.append(Finding("error", str(error)))
    return collected


def started(name: str, config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and composed configs of the other jobs that the job `name` starts."""
    others: list[tuple[str, Mapping[str, Any]]] = invoke(find(name).started, config)
    return others


def _settings(job: Job, config: Mapping[str, Any], coming: Sequence[Path]) -> Iterator[Finding]:
    """Yield the notices and the error that a job would report about its settings before reading anything."""
    error = None
    with redirect_stderr(StringIO()) as notices:
        try:
            if job.check is not None:
                invoke(job.check, config, coming)
        except ValueError as raised:
            error = Finding("error", str(raised))
    yield from (Finding("note", line) for line in notices.getvalue().splitlines() if line.strip())
    if error is not None:
        yield error


def other_tokenizers(config: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield errors for streams that an earlier stage tokenises with a different tokenizer than training uses.

    Args:
        config: config of the training run.
        before: configs of the earlier tokenize stages.
    """
    for stage in before:
        prefixes = {place.resolve() for place in makes("tokenize", stage)}
        for data in data_sections(config):
            if not (data.get("blend") or data.get("streams")) or not isinstance(data.get("tokenizer"), Mapping):
                continue
            shared = [leaf.name for leaf in read_tree(data).leaves() if leaf.prefix.resolve() in prefixes]
            earlier = blend_to_tokenize(stage)["tokenizer"]
            assert isinstance(earlier, Mapping)
            try:
                same = load_tokenizer(earlier).identity == load_tokenizer(data["tokenizer"]).identity
            except ValueError:
                continue  # reported by `findings` of either stage
            if shared and not same:
                yield Finding(
                    "error",
                    f"data.tokenizer={dict(data['tokenizer'])}: {shared[0]} is tokenised with {earlier} in an earlier "
                    "stage; set the same tokenizer in both stages",
                )


def _tokenizers(config: Mapping[str, Any], coming: Sequence[Path]) -> Iterator[Finding]:
    """Yield errors for tokenizers that cannot be read or have more ids than the model's vocabulary."""
    for data in data_sections(config):
        tokenizer = data.get("tokenizer")
        if tokenizer is None and not (data.get("blend") or data.get("streams")):
            continue
        place = Path(str(tokenizer.get("path") or ".") if isinstance(tokenizer, Mapping) else ".").expanduser()
        if not place.exists() and will_exist(place, coming):
            continue
        try:
            check_vocabulary(load_tokenizer(tokenizer).vocab_size, config)
        except ValueError as error:
            yield Finding("error", str(error))


def _queue(config: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    cluster, job = settings.cluster, find(settings.job)
    nodes, gpus = nodes_and_gpus(settings.job, config, settings)
    nodes_key, gpus_key = job.size_keys
    if cluster.node is not None and gpus > cluster.node.gpus:
        advice = f" and launcher.nodes to {-(-nodes * gpus // cluster.node.gpus)}" if job.ranks else ""
        yield Finding(
            "error",
            f"{gpus_key}={gpus}: a node of {cluster.name} has "
            f"{cluster.node.gpus} GPUs; set it to {cluster.node.gpus}{advice}",
        )
    elif cluster.node is not None and 0 < gpus < cluster.node.gpus:
        yield Finding("note", f"uses {gpus} of the {cluster.node.gpus} GPUs of its node")
    limit = cluster.limit
    if cluster.qos is not None and cluster.limits and limit is None:
        yield Finding(
            "error", f"cluster.qos={cluster.qos}: unknown quality of service: {nearest(cluster.qos, cluster.limits)}"
        )
        return
    if limit is None:
        yield Finding("note", f"cluster={cluster.name}: its limits and GPUs are unknown, so they are not checked")
        return
    if limit.nodes is not None and nodes > limit.nodes:
        larger = [name for name, other in cluster.limits.items() if other.nodes is None or other.nodes >= nodes]
        yield Finding("error", f"{nodes_key}={nodes}: {_qos(cluster)} allows {limit.nodes} nodes; {_instead(larger)}")
    if settings.time is not None and duration(settings.time) > duration(limit.time):
        longer = [
            name
            for name, other in cluster.limits.items()
            if duration(settings.time) <= duration(other.time) and (other.nodes is None or nodes <= other.nodes)
        ]
        yield Finding("error", f"time={settings.time}: {_qos(cluster)} allows {limit.time}; {_instead(longer)}")


def unknown_to_slurm(settings: Settings) -> Iterator[Finding]:
    """Yield errors for partitions and a quality of service that Slurm's commands, if installed, do not list."""
    queries = {
        "partition": ["sinfo", "--all", "--noheader", "--format=%R"],
        "qos": ["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name"],
    }
    for key, command in queries.items():
        value = getattr(settings.cluster, key)
        known = call(command).stdout.split() if value is not None and shutil.which(command[0]) else []
        for name in (value or "").split(",") if known else ():
            if name not in known:
                yield Finding("error", f"cluster.{key}={name}: unknown to Slurm: {nearest(name, known)}")


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
        missing = [place for place in needed if not will_exist(place, coming)]
        if missing:
            more = f" and {len(missing) - 1} other{'s' * (len(missing) > 2)}" if len(missing) > 1 else ""
            yield Finding("error", f"data: {missing[0]}{more} not found; {how}")


def _inputs(config: Mapping[str, Any], settings: Settings, coming: Sequence[Path]) -> Iterator[Finding]:
    job = find(settings.job)
    for read in job.inputs(config):
        key, path, how = read.key, read.path, read.advice
        if not will_exist(path, coming):
            yield Finding("error", f"{key}={path}: not found; {how}")
        elif is_coming(path, coming):
            continue
        elif read.model:
            if wrong := _no_checkpoint(key, path):
                yield Finding("error", f"{key}={path}: {wrong}")
        elif path.is_dir() and not any(path.iterdir()):
            yield Finding("error", f"{key}={path}: the folder is empty; {how}")
    record = record_of(settings.job, config, settings)
    if any(character == "\\" or not character.isprintable() for character in str(record.resolve())):
        yield Finding(
            "error",
            f"run_dir={str(record)!r}: sbatch cannot open an output file in it, as its path has a backslash, a line "
            "break or another control character; choose another path",
        )
        return
    above = next(place for place in (record.resolve(), *record.resolve().parents) if place.exists())
    try:
        # Not os.access: for root it reports even /proc and read-only mounts as writable.
        with TemporaryDirectory(prefix=".nemo_ext-", dir=above):
            pass
    except OSError as error:
        yield Finding("error", f"run_dir={record}: {error.strerror} in {above}; choose a writable directory")
        return
    if room := no_room(above):
        yield Finding("error", f"run_dir={record}: {room}; free disk space, or choose another disk")
    if job.ranks != "slurm" or not config["megatron"].get("train_iters"):
        return
    (count, size), free = checkpoints_of(config), shutil.disk_usage(above).free
    if free < size * count:
        has = f"run_dir={record}: {above} has {free / 1e9:,.1f} GB free"
        one = f"a checkpoint takes about {size / 1e9:,.1f} GB, and {count:,} are kept"
        yield Finding(
            "error" if free < size else "warning", f"{has}, but {one}; free disk space, or choose another disk"
        )


def _no_checkpoint(key: str, path: Path) -> str:
    """Reason why a folder does not hold a checkpoint of the kind that the key accepts; "" if it does."""
    if not is_hugging_face(path):
        try:
            checkpoint_folder(path)
        except CheckpointError as error:
            return str(error).removeprefix(f"{path}: ")
    elif key.startswith("megatron."):
        return "this is a Hugging Face checkpoint; convert it to Megatron with `nemo-ext convert`"
    elif not any(file.suffix in _WEIGHTS for file in path.iterdir()):
        return f"the folder has a config.json but no weights ({', '.join(_WEIGHTS)}); copy it again"
    return ""


def _container(cluster: Cluster) -> Iterator[Finding]:
    container = cluster.container
    if not container.used:
        if cluster.name != "generic" and container.runtime != "none":
            yield Finding("note", "cluster.container.image=null: ranks run in the Python environment of this command")
        return
    image = str(container.image)
    if container.runtime != "pyxis" and shutil.which(container.runtime) is None:
        yield Finding("error", f"cluster.container.runtime={container.runtime} is not on PATH; load its module")
    if image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh")):
        if not Path(image).exists():
            yield Finding("error", f"cluster.container.image={image}: no such file; correct the path")
    elif not cluster.internet:
        yield Finding("error", f"cluster.container.image={image}: compute nodes are offline; pull the image to a file")
    unset = [place for place in container.binds if os.path.expandvars(place).startswith("$")]
    if unset:
        yield Finding(
            "note", f"cluster.container.binds: variables that are not set here are not mounted: {', '.join(unset)}"
        )
    if absent := [place for place in cluster.binds() if not Path(place.partition(":")[0]).exists()]:
        places = ", ".join(absent)
        yield Finding(
            "warning", f"cluster.container.binds: not found here: {places}; starts fail on nodes that do not have them"
        )


def _offline(config: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Yield an error if compute nodes have no internet and the tokenizer is neither a folder nor in the cache."""
    if cluster.internet:
        return
    tokenizer = (config.get("data") or {}).get("tokenizer")
    name = tokenizer.get("path") if isinstance(tokenizer, Mapping) else tokenizer
    if not name or Path(str(name)).exists():
        return
    if str(name).count("/") != 1 or str(name).startswith((".", "~", "/")):
        yield Finding("error", f"data.tokenizer: {name}: no such folder; correct the path")
        return
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    if not (hub.expanduser() / f"models--{str(name).replace('/', '--')}").is_dir():
        yield Finding(
            "error",
            f"data.tokenizer: {name} is neither a folder nor in {hub}, and compute nodes have no internet; "
            f"download it here first (hf download {name})",
        )


def _qos(cluster: Cluster) -> str:
    return f"the quality of service {cluster.qos or next(iter(cluster.limits))} of {cluster.name}"


def _instead(names: Sequence[str]) -> str:
    return f"set cluster.qos={names[0]}, which allows it" if names else "no quality of service of the site allows it"
