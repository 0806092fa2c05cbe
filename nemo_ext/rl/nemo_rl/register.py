"""Make our environments known to NeMo-RL, which has no plug-in mechanism."""

import importlib

from nemo_ext.rl.environments import ENVIRONMENTS

PREFIX = "nemo_ext_"
ACTOR = "nemo_ext.rl.nemo_rl.environment.TaskEnvironmentActor"


def register() -> list[str]:
    """Add every environment to NeMo-RL's environment registry, and their actor to that of Python executables.

    Both are needed: the first alone fails when the actor is created. May be called again, and in any process.

    Returns:
        Names in NeMo-RL, `nemo_ext_math` for example.

    Raises:
        ValueError: another environment has one of the names.
    """
    environments = importlib.import_module("nemo_rl.environments.utils")
    actors = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    executables = importlib.import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES
    actors.setdefault(ACTOR, executables.SYSTEM)
    names = [PREFIX + name for name in ENVIRONMENTS]
    for name in names:
        entry = environments.ENV_REGISTRY.get(name)
        if entry is None:
            environments.register_env(name, ACTOR)
        elif entry["actor_class_fqn"] != ACTOR:
            raise ValueError(f"NeMo-RL's environment {name!r} is {entry['actor_class_fqn']}: give that another name")
    return names
