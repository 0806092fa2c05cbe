"""On-policy distillation with NeMo-RL and with TRL, on a CPU: two teachers for two domains.

    NEMO_RL_ROOT=nemo-rl python benchmarks/distillation.py --folder DIR run nemo_rl --preset opd --seeds 1 2 3
    python benchmarks/distillation.py --folder DIR run trl --preset opd --seeds 1 2 3      # and mopd
    python benchmarks/distillation.py --folder DIR report
    python benchmarks/distillation.py --folder DIR gradients

Tasks, sizes and the stand-ins for NeMo-RL's workers and vLLM are those of `rl_engines.py`: a Llama of two layers after
SFT on sums and on JSON by a schema. Each teacher is this model after more SFT on one of the two domains; the policy is
the model with noise in its weights, which cost it correct answers. A step has 32 responses. `report` prints, by run,
the share of correct responses and the KL divergence to each teacher on the policy's own responses (estimator k3, nats
per token) in the first and last steps, from metrics.jsonl. `gradients` compares the gradient of sampled advantages with
the exact gradient of the KL divergence.
"""

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rl_engines import loaded, with_cpu_workers

DOMAINS = ("math", "structured_output")
SIZES = {"opd": (4, 8), "mopd": (32, 1)}
"""Prompts per step and responses per prompt; TRL has at least two responses per prompt."""
FIRST, LAST = 3, 6
"""Numbers of steps whose means are reported."""
BATCHES = 12
"""Number of batches of 64 responses whose gradients are compared."""


def with_teachers(folder: Path, learning: ModuleType) -> tuple[Path, Path, dict[str, Path]]:
    """Prepare policy, tasks and teachers by domain, which are the same for all runs."""
    tasks, policy = folder / "tasks.jsonl", folder / "policy"
    teachers = {name: folder / name for name in DOMAINS}
    if not tasks.is_file():
        model = learning.make_model(folder / "model", 400)
        for rows, place in zip(((24, 0), (0, 12)), teachers.values(), strict=True):
            learning.make_model(place, 40, start=model, rows=rows)
        learning.noisy(model, policy, seed=1, scale=0.6)
        made = learning.tasks(learning.STEPS * learning.PROMPTS // 2, seed=2)
        learning.written(tasks, (task.record() for task in made))
    return policy, tasks, teachers


def train(folder: Path, engine: str, preset: str, seeds: list[int], steps: int, rate: float) -> None:
    """Run one training per seed in FOLDER/runs/ENGINE-PRESET-SEED."""
    learning = loaded("test_learning")
    model, tasks, teachers = with_teachers(folder, learning)
    prompts, generations = SIZES[preset]
    if engine == "trl" and generations == 1:
        prompts, generations = prompts // 2, 2
    places = ", ".join(f"{name}: {place}" for name, place in teachers.items())
    words = [
        *(f"preset={preset}", f"tasks.train.path={tasks}"),
        *("environments={math: {}, structured_output: {}}", f"rl.distillation.teachers={{{places}, default: null}}"),
        *(f"rl.prompts_per_step={prompts}", f"rl.generations_per_prompt={generations}"),
        *(f"rl.batch={prompts * generations}", f"micro_batch={prompts * generations}"),
        *("rl.lengths={prompt: 256, response: 48, total: null}", f"rl.optimizer.learning_rate={rate}"),
    ]
    runs = learning.Runs(None, folder / "runs")
    if engine == "nemo_rl":
        with_cpu_workers(runs)
        opd = importlib.import_module("nemo_rl.algorithms.opd")
        opd.reserve_teacher_clusters = lambda *arguments, **keywords: {}
        opd.create_teacher_worker_groups = runs.policy.teachers
        words += ["nemo_rl.set.cluster={num_nodes: 4, gpus_per_node: 1}"]
        words += ["rl.asynchronous={max_age: 1, in_flight: false}"]
    for seed in seeds:
        name = f"{engine}-{preset}-{seed}"
        runs.start(engine, name, model, *words, f"tasks.train.seed={seed}", seed=seed, steps=steps)


def report(folder: Path) -> None:
    """Print the table of all runs."""
    names = [metric.format(name) for name in DOMAINS for metric in ("{}/correct", "teacher_kl/{}")]
    titles = (
        "preset",
        "engine",
        "seed",
        "steps",
        *(f"{what}, {name}" for name in DOMAINS for what in ("correct", "KL")),
    )
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for run in sorted((folder / "runs").iterdir()):
        engine, preset, seed = run.name.split("-")
        logs = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        cells = []
        for name in names:
            values = [log[name] for log in logs if name in log]
            cells.append(f"{np.mean(values[:FIRST]):.2f} to {np.mean(values[-LAST:]):.2f}")
        print(f"| {' | '.join((preset, engine, seed, str(len(values)), *cells))} |")


def gradients(folder: Path) -> None:
    """Print how the gradients of sampled advantages differ from the exact gradient, at the untrained policy.

    The exact gradient is of KL(policy || teacher) over the whole vocabulary at each token of the same responses.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learning = loaded("test_learning")
    model, _, places = with_teachers(folder, learning)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    prompts = learning.Prompts.load(learning.TEMPLATE, eos=learning.SPECIAL[-1])
    torch.manual_seed(0)

    def responses(tasks: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of prompts and 8 responses to each, and the mask of generated tokens, `[rows, tokens]`."""
        texts = [prompts.prompt(prompts.in_mode(task))[0] for task in tasks for _ in range(8)]
        before = [torch.tensor(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        left = pad_sequence(before, batch_first=True, padding_side="left")
        width = left.shape[1]
        mask = torch.arange(width) >= width - torch.tensor([len(ids) for ids in before])[:, None]
        sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "pad_token_id": 0}
        written = policy.generate(left, attention_mask=mask.long(), eos_token_id=tokenizer.eos_token_id, **sampling)
        rows = [torch.cat([ids, new]) for ids, new in zip(before, written[:, width:], strict=True)]
        generated = [(torch.arange(len(row)) >= len(ids)) & (row != 0) for ids, row in zip(before, rows, strict=True)]
        return pad_sequence(rows, batch_first=True), pad_sequence(generated, batch_first=True).float()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(one, other, dim=0))

    print("| teacher | gradient | norm | cosine of one batch | cosine of the mean of all |")
    print("|---" * 5 + "|")
    for name, place in places.items():
        teacher = AutoModelForCausalLM.from_pretrained(place).eval()
        tasks = [task for task in learning.tasks(2 * 8 * BATCHES, seed=5) if task.environment == name]
        kinds: dict[str, list[torch.Tensor]] = {"exact": [], "sampled": [], "sampled, minus its mean": []}
        for first in range(0, 8 * BATCHES, 8):
            ids, mask = responses(tasks[first : first + 8])
            mask, following = mask[:, 1:], ids[:, 1:, None]
            ours = policy(ids).logits[:, :-1].log_softmax(-1)
            with torch.no_grad():
                theirs = teacher(ids).logits[:, :-1].log_softmax(-1)
            kl = (ours.exp() * (ours - theirs)).sum(-1)
            chosen = ours.gather(-1, following)[..., 0]
            advantage = (theirs.gather(-1, following)[..., 0] - chosen).detach()
            losses = (kl, -advantage * chosen, -(advantage + kl.detach()) * chosen)
            for found, loss in zip(kinds.values(), losses, strict=True):
                found.append(gradient((loss * mask).sum() / mask.sum()))
        exact = torch.stack(kinds["exact"]).mean(0)
        for kind, found in kinds.items():
            norm, one = np.mean([(float(batch.norm()), cosine(batch, exact)) for batch in found], axis=0)
            print(f"| {name} | {kind} | {norm:.2f} | {one:.2f} | {cosine(torch.stack(found).mean(0), exact):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="policy, tasks, teachers and runs")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="one run per seed; the same command resumes them")
    one.add_argument("engine", choices=("trl", "nemo_rl"))
    one.add_argument("--preset", choices=tuple(SIZES), required=True)
    one.add_argument("--seeds", type=int, nargs="+", required=True)
    one.add_argument("--steps", type=int, default=20)
    one.add_argument("--rate", type=float, default=5e-4, help="learning rate")
    commands.add_parser("report", help="table of all runs")
    commands.add_parser("gradients", help="table of gradients")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "run":
        if arguments.engine == "nemo_rl" and not os.environ.get("NEMO_RL_ROOT"):
            parser.error("NEMO_RL_ROOT is not set: set it to a NeMo-RL checkout")
        began = time.process_time()
        train(folder, arguments.engine, arguments.preset, arguments.seeds, arguments.steps, arguments.rate)
        print(f"{time.process_time() - began:.0f} s of this process", file=sys.stderr)
    else:
        {"report": report, "gradients": gradients}[arguments.command](folder)


if __name__ == "__main__":
    main()
