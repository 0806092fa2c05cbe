"""The `nemo-ext puzzle` command: compresses a parent into a smaller model. Also defines its rehearsal's config."""

from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.job import Array, Command, Config, Grammar, Input, Job, Model, inputs, reads
from nemo_ext.megatron.commands import MEGATRON, TRAINING, size

_SETTINGS = {**TRAINING, "puzzle": ("nemo_ext.puzzle.settings:Settings", {"heal": {"megatron": MEGATRON}})}
_GRAMMAR = Grammar(settings=_SETTINGS, streams=True)


def _inputs(config: Config) -> list[Input]:
    puzzle = config["puzzle"]
    return inputs(
        ("puzzle.parent", puzzle["parent"], "train or convert it first"),
        ("puzzle.measure.table", puzzle["measure"]["table"], "run `nemo-ext puzzle` here: it writes a template"),
        model=("puzzle.parent",),
    )


def _child(folder: Path, words: Mapping[str, str]) -> Path | None:
    from nemo_ext.puzzle.workspace import MODEL

    return Path(words["run_dir"]) / words.get("puzzle.child", "child") / MODEL if "run_dir" in words else None


PUZZLE = Job(
    name="puzzle",
    group="compress",
    help="compress a parent into a smaller model: block search, FFN fusion, distillation",
    run="nemo_ext.puzzle.job:run",
    engines=("torch", "megatron-core"),
    resumable=True,
    check=reads("nemo_ext.puzzle.job:check"),
    inputs=_inputs,
    model=Model(key="puzzle.parent", start="puzzle.parent", leaves="megatron", place=_child),
    script="puzzle",
    size=size,
    size_keys=("launcher.nodes", "launcher.nproc_per_node"),
    array=Array(key="puzzle.shard", words=("puzzle.shard={number}/{count}", "puzzle.stages=[distill]")),
    training=True,
    ranks="asked",
    rehearsed=True,
    grammar=_GRAMMAR,
)
REHEARSE_PUZZLE = Command(
    name="rehearse", group="", help="the config of Puzzle's rehearsal", config="rehearse_puzzle", grammar=_GRAMMAR
)
