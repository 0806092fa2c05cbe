"""`nemo-ext rl engine=nemo_rl`: the composed config as NeMo-RL's master config and what our adapter is told."""

import os
import sys
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

from nemo_ext.data.settings import check_keys
from nemo_ext.progress import notice
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.job import flat
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.render import render, section_of
from nemo_ext.run_directory import CHECKPOINTS, write_config, write_versions

_KEYS = ("backend", "set")


def run(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Train with the NeMo-RL that NEMO_RL_ROOT or PYTHONPATH names; a run directory with a checkpoint goes on from it.

    Raises:
        ValueError: NeMo-RL is not there, lacks a key or cannot do what the algorithm says, or the tasks or pairs are
            at fault.
    """
    given, master = settings_of(config, algorithm, Checkout(os.environ.get("NEMO_RL_ROOT")))
    write_config(Path(config["run_dir"]), config)
    write_versions(Path(config["run_dir"]), sys.argv)
    try:
        from nemo_ext.rl.nemo_rl.run import run as train
    except ImportError as error:
        raise ValueError(f"engine=nemo_rl: {error}: docs/rl/nemo_rl.md says what it needs") from None
    notice(f"NeMo-RL: {algorithm.algorithm}, {config['run_dir']}")
    train({**given, "nemo_rl": master})


def settings_of(
    config: Mapping[str, Any], algorithm: Algorithm, checkout: Checkout
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `nemo_ext.rl.nemo_rl.run.run` is told beside the master config, and the master config.

    Raises:
        ValueError: as `run`.
    """
    check_keys(config["nemo_rl"], _KEYS, required=_KEYS, where="nemo_rl")
    if isinstance(algorithm, PolicyGradient) and algorithm.steps is None:
        raise ValueError("rl.schedule.steps=null: say how many steps to train")
    rendered = render(algorithm, checkout, backend=config["nemo_rl"]["backend"]).settled(config["on_inexpressible"])
    section, run_dir = section_of(algorithm), Path(config["run_dir"])
    own: dict[str, Any] = {
        section: {"seed": config["seed"]},
        "policy": {
            "model_name": config["policy"],
            "tokenizer": {"name": config["policy"]},
            "train_micro_batch_size": gcd(algorithm.batch, config["micro_batch"]),
        },
        "checkpointing": {"enabled": True, "checkpoint_dir": str(run_dir / CHECKPOINTS)},
        "logger": {"log_dir": str(run_dir / "logs")},
    }
    if not config["tasks" if isinstance(algorithm, PolicyGradient) else "pairs"].get("validation"):
        # The version's example, and many an algorithm, would validate; with validation that is when it saves, too.
        never = {"val_period": 0, "val_at_start": False, "val_at_end": False}
        keys = checkout.keys(section)
        own[section] |= {key: value for key, value in never.items() if keys.missing(f"{section}.{key}") is None}
        own["checkpointing"] |= {"metric_name": None, "save_period": config["save_every"]}
        if algorithm.validation.every is not None:
            notice("nothing to validate on is given: tasks.validation.path=FILE, or pairs.validation=FILE")
    changes: dict[str, Any] = {}
    for path, value in flat(config["nemo_rl"]["set"] or {}).items():
        _put(changes, path, value)
    master = checkout.config(section, rendered.settings, own, changes)
    given = {key: value for key, value in rendered.adapter.items() if key not in ("data", "validation")}
    given["template"] = config["template"]
    if isinstance(algorithm, PolicyGradient):
        given["tasks"] = {key: value for key, value in config["tasks"].items() if value}
    else:
        given["pairs"] = {key: value for key, value in config["pairs"].items() if value}
    return given, master


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for word in above:
        config = config.setdefault(word, {})
    config[last] = value
