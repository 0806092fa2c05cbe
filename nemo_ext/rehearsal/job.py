"""The rehearsal job: runs a step of some of a full-size job's ranks on this machine before the job is queued."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.config import compose
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked
from nemo_ext.rehearsal.puzzle import rehearse_puzzle
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.search import gpu_of, has_rates, predict, search
from nemo_ext.rehearsal.settings import STAGES, Settings, is_own, one_phase


def job(config: dict[str, Any]) -> None:
    """Rehearse a training run or compression, or search for its fastest layouts; print and write the report.

    Without a search, the config is rehearsed as it is and with each of the changes in `rehearse.try`.

    Raises:
        ValueError: a setting is invalid, or the model does not fit a layout.
    """
    from hydra.core.hydra_config import HydraConfig

    from nemo_ext.rehearsal.report import write

    settings = checked(Settings, config["rehearse"], "rehearse")
    if config["format"] not in ("table", "json"):
        raise ValueError(f"format={config['format']}: expected table or json")
    running = HydraConfig.get()
    folders = [f"--config-dir={source.path}" for source in running.runtime.config_sources if source.schema == "file"]
    words = [*folders, *running.overrides.task]
    folder = Path(config["run_dir"])
    name, limit = _gpu(settings, config)
    folder.mkdir(parents=True, exist_ok=True)

    def rehearse_config(variant: Mapping[str, Any], number: int) -> dict[str, Any]:
        records = folder / "ranks" / str(number)
        if "puzzle" in variant:
            result = rehearse_puzzle(variant, records, settings.stages, imbalance=settings.imbalance)
            if not result["ranks"]:
                raise ValueError(
                    f"puzzle.stages={variant['puzzle']['stages']}: nothing to rehearse, as none of parent, "
                    f"{', '.join(STAGES)} and heal runs with these settings; add one of them"
                )
            return result
        result = rehearse(variant, settings.stages, records, imbalance=settings.imbalance)
        if name is not None and has_rates(name):
            try:
                result["prediction"] = predict(one_phase(variant), *gpu_of(name, limit))
            except ValueError as error:
                notice(f"the throughput is not predicted: {error}")
        return result

    def composed(change: list[str]) -> dict[str, Any]:
        return compose(str(running.job.config_name), [*words, *change])

    def rehearse_change(change: list[str], number: int) -> dict[str, Any]:
        return rehearse_config(composed(change), number)

    searched, failed = None, dict[str, str]()
    if settings.search:
        if "puzzle" in config:
            raise ValueError(
                "rehearse.search searches layouts for training and does not apply to job=puzzle; remove it"
            )
        searched, results = search(config, *gpu_of(name, limit), settings.best, rehearse_change)
        searched["command"] = [word.removeprefix("++") for word in words if not is_own(word)]
        limit = searched["fill"] * searched["gpu"]["memory_gib"]
    else:
        variants = [("", config)]
        variants += [(change, composed(change.split())) for change in settings.variants]
        results = []
        for number, (change, variant) in enumerate(variants):
            try:
                results.append({"change": change, "number": number, **rehearse_config(variant, number)})
            except ValueError as error:
                if not number:
                    raise
                failed[change] = str(error)
                notice(f"rehearse.try: {change!r} cannot be rehearsed: {error}")
    write(
        folder,
        config["recipe"],
        results,
        model=(config.get("model") or {}).get("name"),
        limit=limit,
        gpu=name,
        searched=searched,
        failed=failed,
        as_json=config["format"] == "json",
    )


def _gpu(settings: Settings, config: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Return the GPUs' name and memory in GiB, from the settings or the site; each is None if neither gives it.

    Raises:
        ValueError: the GPU is unknown, or the site's nodes have fewer GPUs than `launcher.nproc_per_node`.
    """
    site = config.get("cluster") or {}
    node, per_node = site.get("node") or {}, int(config["launcher"]["nproc_per_node"])
    if node and per_node > node["gpus"]:
        raise ValueError(
            f"launcher.nproc_per_node={per_node}: a node of {site['name']} has {node['gpus']} GPUs; change it and "
            "launcher.nodes"
        )
    memory = settings.gpu_memory_gib
    if settings.gpu is not None:
        memory = gpu_of(settings.gpu, memory)[1].memory_gib
    return settings.gpu or node.get("gpu"), memory
