"""The commands `nemo-ext evaluate`, `compare`, `rollouts` and `merge_sweep`: evaluate models and compare results."""

import json
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.figures import Figures
from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs, reads
from nemo_ext.job.settings import Places, strings
from nemo_ext.rl.commands import ENVIRONMENTS
from nemo_ext.serving.commands import SERVED, asking, on_one_node, size_of_one

ASKED = {"evaluate": ("nemo_ext.evaluation.settings:EvaluateSettings", {"judge": "nemo_ext.rl.judge:JudgeSettings"})}
"""Settings classes of the config section `evaluate`."""


def _figures(run_dir: Path) -> Figures:
    from nemo_ext.evaluation.report import figure
    from nemo_ext.evaluation.store import RESULTS

    if not (run_dir / RESULTS).is_file():
        return Figures()
    mean = json.loads((run_dir / RESULTS).read_text()).get("mean")
    return Figures(text=f"accuracy {figure(mean['accuracy'], mean.get('interval')).text}" if mean else "")


EVALUATE = asking(
    name="evaluate",
    group="serve and evaluate",
    help="evaluate a model or an endpoint: benchmarks with intervals, tokens and every answer",
    run="nemo_ext.evaluation.job:run",
    check=reads("nemo_ext.evaluation.job:check"),
    figures=_figures,
    grammar=Grammar(
        settings=("nemo_ext.evaluation.settings:Settings", ASKED),
        aliases={"model": "served", "suite": "evaluate.suite"},
    ),
)


ROLLOUTS = asking(
    name="rollouts",
    group="reinforcement learning",
    help="sample and verify answers to RL tasks: pass rates for curricula",
    run="nemo_ext.evaluation.rollouts:run",
    check=reads("nemo_ext.evaluation.rollouts:check"),
    figures=_figures,
    grammar=Grammar(
        settings=(
            "nemo_ext.evaluation.settings:Settings",
            ASKED,
            {
                "rollouts": (
                    "nemo_ext.evaluation.rollouts:RolloutSettings",
                    {"environments": ENVIRONMENTS, "group": "nemo_ext.rl.algorithms:GroupReward"},
                )
            },
        ),
        aliases={"model": "served"},
    ),
)


def _compare_inputs(config: Config) -> list[Input]:
    runs = config["runs"].values() if isinstance(config["runs"], Mapping) else strings(config["runs"])
    advice = "`nemo-ext evaluate` and `nemo-ext rollouts` create such run directories"
    return inputs(*(("runs", place, advice) for place in runs))


COMPARE = Job(
    name="compare",
    group="serve and evaluate",
    help="compare evaluations side by side, with paired tests and published values",
    run="nemo_ext.evaluation.compare_page:run",
    inputs=_compare_inputs,
    script="task",
    grammar=Grammar(settings="nemo_ext.evaluation.compare:CompareSettings"),
)


MERGE_SWEEP = Job(
    name="merge_sweep",
    group="compress",
    help="average checkpoints with several weights, evaluate each average, choose one from the Pareto front",
    run="nemo_ext.evaluation.merges:run",
    engines=("torch",),
    resumable=True,
    check=reads("nemo_ext.evaluation.merges:check", files="megatron"),
    findings=on_one_node,
    inputs=lambda config: inputs(
        *(("from", place, "train or convert it first") for place in strings(config["from"])), model=("from",)
    ),
    model=Model(leaves="any", place=lambda folder, words: folder / "chosen", trained=True),
    script="task",
    size=size_of_one,
    size_keys=("serving.nodes", "serving.gpus"),
    own_folder=True,
    serving="meanwhile",
    grammar=Grammar(
        settings=(SERVED, ASKED, {"from": Places, "sweep": "nemo_ext.evaluation.merges:SweepSettings"}),
        aliases={"suite": "evaluate.suite"},
    ),
)
