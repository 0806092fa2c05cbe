"""The `nemo-ext quantize` command: makes an FP8 checkpoint for vLLM from a precision plan, with ModelOpt."""

from pathlib import Path

from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs, reads
from nemo_ext.job.settings import Open, Place


def _inputs(config: Config) -> list[Input]:
    data = str(config["calibration"]["data"] or "")
    # Packs are named by a prefix, which is not a file, and globs are expanded when they are read.
    file = data if data.endswith((".jsonl", ".parquet")) and not set(data) & set("*?[") else None
    return inputs(
        ("from", config["from"], "train or convert it first"),
        ("files_from", config["files_from"], "name a folder"),
        ("calibration.data", file, "name conversations"),
        model=("from",),
    )


QUANTIZE = Job(
    name="quantize",
    group="compress",
    help="make an FP8 checkpoint for vLLM by a precision plan, with ModelOpt",
    run="nemo_ext.quantization.job:run",
    engines=("torch",),
    resumable=True,
    check=reads("nemo_ext.quantization.settings:read_settings"),
    inputs=_inputs,
    outputs=lambda config: [config["to"]],
    model=Model(
        key="from",
        takes="hugging_face",
        leaves="any",
        place=lambda folder, words: Path(words["to"]) if "to" in words else None,
        trained=True,
    ),
    script="task",
    size=lambda config, settings: (1, 0 if config["device"] == "cpu" else 1),
    grammar=Grammar(
        settings={
            **dict.fromkeys(("from", "to", "files_from"), Place),
            "calibration": {"data": Place, "template": Place},
            "megatron": Open,
            "precision_plan": Open,
        },
    ),
)
