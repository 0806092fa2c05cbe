"""The `nemo-ext online` command: trains by DPO or RPO in rounds on the policy's own responses."""

from collections.abc import Sequence
from pathlib import Path

from nemo_ext.evaluation.commands import ASKED
from nemo_ext.job.job import Config, Grammar, Input, Job, Model
from nemo_ext.rl.commands import ENVIRONMENTS, RL, figures, training_inputs
from nemo_ext.serving.commands import SERVED, extras, on_one_node, size_of_one


def _inputs(config: Config) -> list[Input]:
    return training_inputs(config, "served")


def _check(config: Config, coming: Sequence[Path]) -> None:
    from nemo_ext.online.job import check

    check(config, tasks=all(read.path.exists() for read in _inputs(config)))


ONLINE = Job(
    name="online",
    group="reinforcement learning",
    help="train by DPO or RPO in rounds on the policy's own responses: generate, judge, train",
    run="nemo_ext.online.job:run",
    extras=lambda config: ("trl", *extras(config)),
    resumable=True,
    check=_check,
    findings=on_one_node,
    inputs=_inputs,
    model=Model(
        key="model", takes="hugging_face", leaves="any", place=lambda folder, words: folder / "model", trained=True
    ),
    script="task",
    size=size_of_one,
    size_keys=("serving.nodes", "serving.gpus"),
    own_folder=True,
    serving="meanwhile",
    figures=figures,
    grammar=Grammar(
        settings=(
            "nemo_ext.online.settings:Settings",
            SERVED,
            RL,
            ASKED,
            {"online": {"environments": ENVIRONMENTS, "group": "nemo_ext.rl.algorithms:GroupReward"}},
        ),
        aliases={"model": "served"},
        groups={"preset": "rl"},
    ),
)
