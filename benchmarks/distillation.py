"""On-policy distillation with NeMo-RL and with TRL, on a CPU: two teachers for two domains.

    NEMO_RL_ROOT=nemo-rl python benchmarks/distillation.py --folder DIR run nemo_rl --preset opd --seeds 1 2 3
    python benchmarks/distillation.py --folder DIR run trl --preset opd --seeds 1 2 3      # and mopd
    python benchmarks/distillation.py --folder DIR report
    python benchmarks/distillation.py --folder DIR gradients

Tasks, sizes and the stand-ins for NeMo-RL's workers and vLLM are those of `rl_engines.py`: a Llama of two layers after
SFT on sums and on JSON by a schema. Each teacher is this model after more SFT on one of the two domains; the policy is
the model with noise in its weights, which cost it correct answers. A step has 32 responses. `report` prints, for the
policy before and after each run, the share of correct responses to 24 held-out tasks of each domain, with 4 responses
each, and the KL divergence to the domain's teacher on them, over the whole vocabulary, in nats per token. `gradients`
compares the gradient of sampled advantages with the exact gradient of this divergence.
"""

import argparse
import asyncio
import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rl_engines import loaded, with_cpu_workers

from nemo_ext.rl.episodes import Episode, Episodes

DOMAINS = ("math", "structured_output")
SIZES = {"opd": (4, 8), "mopd": (32, 1)}
"""Prompts per step and responses per prompt; TRL has at least two responses per prompt."""
HELD_OUT = 5
"""Seed of the held-out tasks."""
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
    """Print the table of the policy and of all runs."""
    learning = loaded("test_learning")
    policy, _, places = with_teachers(folder, learning)
    models = {"before": policy} | {run.name: run / "model" for run in sorted((folder / "runs").iterdir())}
    titles = ["run", *(f"{title}, {name}" for name in DOMAINS for title in ("correct", "KL"))]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for run, model in models.items():
        if not model.is_dir():
            continue
        cells = []
        for name, place in places.items():
            samples = Samples(learning, model, place, HELD_OUT)
            samples.draw(name, slice(0, 24), responses=4)
            kl = float((samples.divergence().detach() * samples.mask).sum() / samples.mask.sum())
            cells += [f"{samples.correct(name):.2f}", f"{kl:.3f}"]
        print(f"| {run} | {' | '.join(cells)} |", flush=True)


class Samples:
    """Responses of a model to held-out tasks, and distributions of the model and a teacher at each token.

    Attributes:
        ids: token ids of prompts and responses, `[rows, tokens]`.
        mask: 1 for generated tokens, shifted to the position before, `[rows, tokens - 1]`.
    """

    def __init__(self, learning: ModuleType, model: Path, teacher: Path, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.learning, self.tokenizer = learning, AutoTokenizer.from_pretrained(model)
        load = AutoModelForCausalLM.from_pretrained
        self.model, self.teacher = (load(place).float().eval() for place in (model, teacher))
        self.prompts = learning.Prompts.load(learning.TEMPLATE, eos=learning.SPECIAL[-1])
        self.tasks = learning.tasks(2 * 8 * BATCHES, seed=seed)
        torch.manual_seed(seed)

    def draw(self, name: str, which: slice, responses: int) -> None:
        """Sample responses to some of a domain's tasks."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        self.drawn = [task for task in self.tasks if task.environment == name][which]
        self.drawn = [task for task in self.drawn for _ in range(responses)]
        texts = [self.prompts.prompt(self.prompts.in_mode(task))[0] for task in self.drawn]
        before = [torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        left = pad_sequence(before, batch_first=True, padding_side="left")
        width = left.shape[1]
        given = torch.arange(width) >= width - torch.tensor([len(ids) for ids in before])[:, None]
        sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "pad_token_id": 0}
        ends = {"eos_token_id": self.tokenizer.eos_token_id}
        self.written = self.model.generate(left, attention_mask=given.long(), **sampling, **ends)[:, width:]
        rows = [torch.cat([ids, new]) for ids, new in zip(before, self.written, strict=True)]
        masks = [(torch.arange(len(row)) >= len(ids)) & (row != 0) for ids, row in zip(before, rows, strict=True)]
        self.ids = pad_sequence(rows, batch_first=True)
        self.mask = pad_sequence(masks, batch_first=True).float()[:, 1:]

    def correct(self, name: str) -> float:
        """Return the share of correct responses, by the environment's verifier."""
        episodes = Episodes({"name": name}, self.prompts)
        texts = self.tokenizer.batch_decode(self.written, skip_special_tokens=True)
        turns = asyncio.run(episodes.turns([Episode(task=task, thinking_opened=False) for task in self.drawn], texts))
        return float(np.mean([turn.verdict is not None and turn.verdict.score == 1 for turn in turns]))

    def divergence(self) -> Any:
        """Return KL(model || teacher) over the whole vocabulary at each token, `[rows, tokens - 1]`, in nats."""
        import torch

        self.ours = self.model(self.ids).logits[:, :-1].log_softmax(-1)
        with torch.no_grad():
            self.theirs = self.teacher(self.ids).logits[:, :-1].log_softmax(-1)
        return (self.ours.exp() * (self.ours - self.theirs)).sum(-1)


def gradients(folder: Path) -> None:
    """Print how gradients of sampled advantages differ from the exact gradient of the KL, before training."""
    import torch

    learning = loaded("test_learning")
    policy, _, places = with_teachers(folder, learning)

    def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(one, other, dim=0))

    print("| teacher | gradient | norm | cosine of one batch | cosine of the mean of all |")
    print("|---" * 5 + "|")
    for name, place in places.items():
        samples = Samples(learning, policy, place, HELD_OUT)
        parameters = list(samples.model.parameters())
        kinds: dict[str, list[torch.Tensor]] = {"exact": [], "sampled": [], "sampled, minus its mean": []}
        for first in range(0, 8 * BATCHES, 8):
            samples.draw(name, slice(first, first + 8), responses=8)
            kl, following, mask = samples.divergence(), samples.ids[:, 1:, None], samples.mask
            chosen = samples.ours.gather(-1, following)[..., 0]
            advantage = (samples.theirs.gather(-1, following)[..., 0] - chosen).detach()
            losses = (kl, -advantage * chosen, -(advantage + kl.detach()) * chosen)
            for found, loss in zip(kinds.values(), losses, strict=True):
                parts = torch.autograd.grad((loss * mask).sum() / mask.sum(), parameters, retain_graph=True)
                found.append(torch.cat([part.flatten() for part in parts]))
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
