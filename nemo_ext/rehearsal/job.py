"""`nemo-ext rehearse`: ranks of a full-size training job, stepped here before it queues."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.config import compose
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked
from nemo_ext.rehearsal.puzzle import rehearse_puzzle
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.search import gpu_of, search
from nemo_ext.rehearsal.settings import STAGES, Settings, is_own


def job(config: dict[str, Any]) -> None:
    """Rehearses a training run or a compression, and what `rehearse.try` changes in it; prints and writes the figures.

    Raises:
        ValueError: a setting, or a layout that the model does not fit; gives the reason.
    """
    from hydra.core.hydra_config import HydraConfig

    from nemo_ext.rehearsal.report import write

    settings = checked(Settings, config["rehearse"], "rehearse")
    if config["format"] not in ("table", "json"):
        raise ValueError(f"format={config['format']}: expected table or json")
    running = HydraConfig.get()
    own = [f"--config-dir={each.path}" for each in running.runtime.config_sources if each.schema == "file"]
    words = [*own, *running.overrides.task]
    folder = Path(config["run_dir"])
    name, limit = _gpu(settings, config)
    folder.mkdir(parents=True, exist_ok=True)

    def one(each: Mapping[str, Any], number: int) -> dict[str, Any]:
        own = folder / "ranks" / str(number)
        if "puzzle" in each:
            made = rehearse_puzzle(each, own, settings.stages, imbalance=settings.imbalance)
            if not made["ranks"]:
                raise ValueError(
                    f"puzzle.stages={each['puzzle']['stages']}: nothing to rehearse: of parent, {', '.join(STAGES)} "
                    "and heal none runs with these settings"
                )
            return made
        return rehearse(each, settings.stages, own, imbalance=settings.imbalance)

    def composed(change: list[str]) -> dict[str, Any]:
        return compose(str(running.job.config_name), [*words, *change])

    def changed(change: list[str], number: int) -> dict[str, Any]:
        return one(composed(change), number)

    searched, failed = None, dict[str, str]()
    if settings.search:
        if "puzzle" in config:
            raise ValueError("rehearse.search looks for layouts of training: Puzzle's stages have none to choose")
        searched, results = search(config, *gpu_of(name, limit), settings.best, changed)
        searched["command"] = [word.removeprefix("++") for word in words if not is_own(word)]
        limit = searched["fill"] * searched["gpu"]["memory_gib"]
    else:
        variants = [("", config)]
        variants += [(change, composed(change.split())) for change in settings.variants]
        results = []
        for number, (change, each) in enumerate(variants):
            try:
                results.append({"change": change, "number": number, **one(each, number)})
            except ValueError as error:
                if not number:
                    raise
                failed[change] = str(error)
                notice(f"rehearse.try: {change}: {error}")
    write(
        folder,
        config["recipe"],
        results,
        limit=limit,
        gpu=name,
        searched=searched,
        failed=failed,
        as_json=config["format"] == "json",
    )


def _gpu(settings: Settings, config: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Name and memory in GiB of the GPUs, as far as the settings and the site say them.

    Raises:
        ValueError: there is no such GPU, or the site's nodes have fewer than the config starts ranks on.
    """
    site = config.get("cluster") or {}
    node, per_node = site.get("node") or {}, int(config["launcher"]["nproc_per_node"])
    if node and per_node > node["gpus"]:
        raise ValueError(
            f"launcher.nproc_per_node={per_node}: a node of {site['name']} has {node['gpus']} GPUs; set it and "
            "launcher.nodes"
        )
    memory = settings.gpu_memory_gib
    if settings.gpu is not None:
        memory = gpu_of(settings.gpu, memory)[1].memory_gib
    return settings.gpu or node.get("gpu"), memory
