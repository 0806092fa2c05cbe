"""The `nemo-ext sensitivity` command: measures how sensitive a model's blocks are to FP8, and proposes a plan."""

from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs, reads
from nemo_ext.megatron.commands import TRAINING, size


def _inputs(config: Config) -> list[Input]:
    key = "sensitivity.model"
    return inputs((key, config["sensitivity"]["model"], "train or convert it first"), model=(key,))


SENSITIVITY = Job(
    name="sensitivity",
    group="compress",
    help="find the blocks that need more than FP8, and a plan that keeps a loss budget",
    run="nemo_ext.sensitivity.job:run",
    engines=("torch", "megatron-core"),
    resumable=True,
    check=reads("nemo_ext.sensitivity.settings:read_settings"),
    inputs=_inputs,
    model=Model(key="sensitivity.model", start="sensitivity.model"),
    script="task",
    size=size,
    size_keys=("launcher.nodes", "launcher.nproc_per_node"),
    training=True,
    grammar=Grammar(settings={**TRAINING, "sensitivity": "nemo_ext.sensitivity.settings:Settings"}, streams=True),
)
