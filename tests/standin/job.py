"""`nemo_ext.puzzle.job` with two stages: ranks that work block by block, and a training, both on all nodes."""

from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_ext import launch
from nemo_ext.job.config import compose
from nemo_ext.job.rank import check_machine, start
from nemo_ext.job.run_directory import last_checkpoint, write_config

STEPS = 20


def run(config: dict[str, Any]) -> None:
    """Carry out what is not finished."""
    check_machine(config)
    run_dir, ranks = Path(config["run_dir"]), config["launcher"]["nproc_per_node"]
    count = ranks * config["launcher"]["nodes"]
    if any(not (run_dir / f"stage-{rank}").is_file() for rank in range(count)):
        start("nemo_ext.puzzle.rank", write_config(run_dir, config), ranks=ranks)
    else:
        print("stage: finished before", flush=True)
    words = [f"run_dir={run_dir}/parent", "data=mock", "recipe=nemotron3_nano/quickstart", "megatron.seq_length=64"]
    training = compose("train", [*words, "megatron.global_batch_size=2", f"train.tokens={STEPS * 128}"])
    write_config(run_dir / "parent", training)
    if (last_checkpoint(run_dir / "parent") or 0) < STEPS:
        launch._run_ranks(run_dir / "parent", ranks, STEPS, Console())
