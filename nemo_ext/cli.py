"""`nemo-ext JOB key=value`, the same as `python launchers/JOB.py key=value`. Imports only that job's launcher."""

import importlib
import sys

from nemo_ext import __version__
from nemo_ext.job.settings import nearest

JOBS = {
    "train": "train a model with Megatron's own trainer (resumes by itself)",
    "submit": "check a training job and hand it to Slurm; it goes on by itself after stops",
    "status": "runs on Slurm: state, step, time left, loss, restarts",
    "logs": "the log of a run on Slurm, and with -f what comes",
    "cancel": "cancel a run's job on Slurm; its ranks save first",
    "tokenize": "turn text, JSONL, Parquet or source trees into Megatron's .bin/.idx",
    "sft_data": "conversations into packed sequences with loss masks: filters, chat templates, reasoning control",
    "preference_data": "generations into DPO pairs and reward model samples, for TRL and NeMo-RL",
    "blend": "what each stream of a blend gets: shares, epochs, warnings; files for trainers",
    "curriculum": "an order of RL prompts from easy to hard, from measured pass rates",
    "rl_tasks": "RL tasks that the package makes itself: mathematics, code, instructions, tools and more",
    "rl": "GRPO, RLOO, DPO and RPO by the papers' presets, with TRL or NeMo-RL",
    "gym": "NeMo Gym servers around the RL environments, in a folder of their own",
    "merge": "average checkpoints: a weighted soup, or points on the line between two",
    "puzzle": "a smaller model out of a parent: block search, FFN fusion, distillation",
    "quantize": "FP8 checkpoints for vLLM by a precision plan, with ModelOpt",
    "sensitivity": "which blocks need more than FP8, and the plan that keeps a loss budget",
    "convert": "checkpoints between Hugging Face and Megatron, in both directions",
    "describe": "parameters, FLOPs and memory of a model, as a table, JSON or picture",
    "doctor": "which engines are usable on this machine, and what the others lack",
}


def main() -> None:
    """The `nemo-ext` command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return
    if words[0] in ("-V", "--version"):
        print(f"nemo-ext {__version__}")
        return
    job = words[0]
    if job not in JOBS:
        print(f"error: there is no job {job!r}: {nearest(job, JOBS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"nemo-ext {job}", *words[1:]]
    importlib.import_module(f"launchers.{job}").main()


def _help() -> str:
    width = max(map(len, JOBS))
    jobs = "\n".join(f"  {name:<{width}}  {what}" for name, what in JOBS.items())
    return (
        f"usage: nemo-ext JOB [key=value ...]\n\n{jobs}\n\n"
        "nemo-ext JOB --help      the job's settings\n"
        "nemo-ext JOB --cfg job   the composed configuration, without running"
    )


if __name__ == "__main__":
    main()
