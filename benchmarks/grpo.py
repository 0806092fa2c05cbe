"""GRPO on one machine, end to end: SFT of a tiny model, then GRPO with and without a curriculum.

    python benchmarks/grpo.py [--folder DIR] [--seeds 3] [--steps 100]

It uses the commands of users: tasks with correct answers (`rl_tasks`), packs of conversations (`sft_data`), Megatron's
trainer (`train`), an export (`convert`), rollouts for pass rates, an order from easy to hard without tasks that are
always or never solved (`curriculum`), and GRPO with TRL (`rl`), in random and curriculum order, for the same number of
steps. Two environments: JSON by a schema, and following instructions. Reported: rewards on held-out validation tasks
before and after, with 95 % intervals over the seeds, and a plot of the training rewards.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

GENERATORS = {"structured_output": ("schemas", (2, 3)), "instructions": ("instructions", (1, 2))}
SFT_SEED, TRAIN_SEED, VALIDATION_SEED = 1, 2, 3
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>")
RESPONSES, GENERATIONS, TOKENS = 64, 8, 64
PROFILE_GENERATIONS = 4
ORDERS = ("random", "curriculum")


def nemo_ext(*words: str) -> None:
    """Run one command, which must succeed."""
    done = subprocess.run([sys.executable, "-m", "nemo_ext.cli", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"nemo-ext {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def records(path: Path) -> Iterator[dict]:
    """Records of a JSONL file."""
    return map(json.loads, path.read_text().splitlines())


def make_tasks(folder: Path) -> None:
    """Make validation tasks, training tasks and conversations for SFT, without common prompts."""
    taken: set[str] = set()
    for split, seed, count in (
        ("validation", VALIDATION_SEED, 48),
        ("train", TRAIN_SEED, 1440),
        ("sft", SFT_SEED, 1500),
    ):
        for environment, (generator, levels) in GENERATORS.items():
            tasks, chats = [], []
            for level in levels:
                made, solved = folder / "tasks.tmp", folder / "solved.tmp"
                words = (f"generator={generator}", f"level={level}", f"count={count // len(levels)}", f"seed={seed}")
                nemo_ext("rl_tasks", *words, f"output={made}", f"solutions={solved}")
                for task, chat in zip(records(made), records(solved), strict=True):
                    prompt = task["prompt"][-1]["content"]
                    if prompt not in taken:
                        taken |= {prompt} if split == "validation" else set()
                        tasks.append(task)
                        chats.append(chat)
            target = folder / split / f"{environment}.jsonl"
            target.parent.mkdir(exist_ok=True)
            target.write_text("".join(json.dumps(each) + "\n" for each in (chats if split == "sft" else tasks)))
    for split in ("train", "validation"):
        parts = sorted((folder / split).glob("*.jsonl"))
        (folder / f"{split}.jsonl").write_text("".join(part.read_text() for part in parts))


def make_model(folder: Path) -> None:
    """Make a random Llama of 0.9 M parameters with a tokenizer trained on the conversations."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from nemo_ext.chat.template import Template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=768, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    chats = [record for path in sorted((folder / "sft").glob("*.jsonl")) for record in records(path)]
    tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat["messages"]), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[3], pad_token=SPECIAL[4]
    )
    made.chat_template = Template.load("llama_nemotron").source
    made.save_pretrained(folder / "base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 4}
    config = LlamaConfig(vocab_size=768, num_key_value_heads=2, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder / "base")


def fine_tune(folder: Path, steps: int) -> None:
    """Run SFT with Megatron's trainer, and export the model."""
    nemo_ext("convert", f"from={folder / 'base'}", f"to={folder / 'megatron'}")
    (model,) = (folder / "megatron" / "model").glob("*.yaml")
    sources = ", ".join(f"{{name: {name}, path: {folder / 'sft' / name}.jsonl, task: {name}}}" for name in GENERATORS)
    nemo_ext(
        *("sft_data", f"output={folder / 'packs'}", "template=llama_nemotron", f"sources=[{sources}]", "workers=1"),
        *(f"tokenizer={folder / 'base'}", "packing.capacity=1024", "reasoning={strip: 0.0, truncate: 0.0}"),
        *("near_duplicates=null", "filters.repetition=null", "validation_share=0.02"),
    )
    nemo_ext(
        *("train", f"--config-dir={folder / 'megatron'}", f"model={model.stem}", f"run_dir={folder / 'sft_run'}"),
        *("data=packed", f"data.packed.train={folder / 'packs/train'}", f"data.packed.valid={folder / 'packs/valid'}"),
        *(f"megatron.pretrained_checkpoint={folder / 'megatron'}", "megatron.seq_length=1024", "megatron.lr=2e-3"),
        *("megatron.max_position_embeddings=2048", "megatron.micro_batch_size=1", "megatron.global_batch_size=2"),
        *("megatron.eval_iters=1", f"train.tokens={steps * 2048}"),
    )
    nemo_ext("convert", f"from={folder / 'sft_run'}", f"to={folder / 'sft_model'}", f"files_from={folder / 'base'}")


def rl(folder: Path, run_dir: Path, seed: int, steps: int, *words: str, generations: int = GENERATIONS) -> None:
    """Run GRPO with OLMo 3's RL-Zero preset at small scale."""
    nemo_ext(
        *("rl", "preset=rl_zero", f"model={folder / 'sft_model'}", f"run_dir={run_dir}", f"seed={seed}"),
        *(f"rl.prompts_per_step={RESPONSES // generations}", f"rl.generations_per_prompt={generations}"),
        *(f"rl.batch={RESPONSES}", f"micro_batch={RESPONSES}", f"rl.lengths.response={TOKENS}"),
        "on_inexpressible=warn",
        *(
            "environments={structured_output: {}, instructions: {}}",
            f"rl.schedule={{kind: constant, steps: {steps}}}",
            *words,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for all files; existing ones are reused")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sft-steps", type=int, default=180)
    parser.add_argument("--learning-rate", default="3e-4")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "sft_model" / "config.json").is_file():
            with timed("tasks, model and SFT"):
                make_tasks(folder)
                make_model(folder)
                fine_tune(folder, arguments.sft_steps)
        if not (folder / "curriculum" / "curriculum.jsonl").is_file():
            with timed("profile and curriculum"):
                profile(folder, arguments.steps)
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // arguments.jobs))
        for order in ORDERS:
            with timed(f"GRPO, {order}, {arguments.seeds} seeds"), ThreadPoolExecutor(arguments.jobs) as pool:
                runs = [
                    pool.submit(train, folder, order, seed, arguments.steps, arguments.learning_rate)
                    for seed in range(1, arguments.seeds + 1)
                ]
                for run in runs:
                    run.result()
        report(folder, arguments.seeds)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints the duration."""
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def profile(folder: Path, steps: int) -> None:
    """Measure pass rates of all tasks with a run that does not learn, and order them from easy to hard."""
    tasks = folder / "train.jsonl"
    passes = len(tasks.read_text().splitlines()) // (RESPONSES // PROFILE_GENERATIONS)
    words = (f"tasks.train.path={tasks}", "trl.learning_rate=0.0")
    rl(folder, folder / "profile", 0, passes, *words, generations=PROFILE_GENERATIONS)
    nemo_ext(
        *("curriculum", f"prompts={tasks}", f"rollouts={folder / 'profile/rollouts.jsonl'}"),
        *(f"output={folder / 'curriculum'}", f"batch={RESPONSES // GENERATIONS}", f"steps={steps}"),
        *("domains={schemas: 0.5, instructions: 0.5}", "exhausted=repeat", "filters.keep_from=0.2"),
    )


def train(folder: Path, order: str, seed: int, steps: int, learning_rate: str) -> None:
    """Train one seed in random or curriculum order, validated before and after."""
    orders = {
        "random": (f"tasks.train.path={folder / 'train.jsonl'}", f"tasks.train.seed={seed}"),
        "curriculum": (f"tasks.train.curriculum={folder / 'curriculum'}",),
    }
    rl(
        *(folder, folder / f"{order}-{seed}", seed, steps, *orders[order], f"trl.learning_rate={learning_rate}"),
        *(
            f"tasks.validation.path={folder / 'validation.jsonl'}",
            f"rl.validation={{every: {steps}, at_start: true}}",
        ),
    )


def report(folder: Path, seeds: int) -> None:
    """Write a table of validation rewards and a plot of training rewards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    print("| order | | before | after | gain |\n|---|---|---|---|---|")
    for order in ORDERS:
        logs = [list(records(folder / f"{order}-{seed}" / "metrics.jsonl")) for seed in range(1, seeds + 1)]
        for name in ("eval_reward", *(f"eval_{environment}/reward" for environment in sorted(GENERATORS))):
            found = np.array([[log[name] for log in run if name in log] for run in logs])
            gains = found[:, -1] - found[:, 0]
            cells = (interval(found[:, 0]), interval(found[:, -1]), interval(gains))
            print(f"| {order} | {name.removeprefix('eval_')} | {' | '.join(cells)} |")
        rewards = np.array([[log["reward"] for log in run if "reward" in log] for run in logs])
        mean, half = rewards.mean(axis=0), 1.96 * rewards.std(axis=0, ddof=min(1, seeds - 1)) / seeds**0.5
        (line,) = axis.plot(np.arange(1, len(mean) + 1), mean, label=order)
        axis.fill_between(np.arange(1, len(mean) + 1), mean - half, mean + half, alpha=0.2, color=line.get_color())
    axis.set_title(f"Reward while training, mean of {seeds} seeds and 95 % interval", loc="left", fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(folder / "grpo.png", dpi=130)
    print(f"plot: {folder / 'grpo.png'}")


def interval(values: np.ndarray) -> str:
    """Mean with a 95 % interval of Student's t."""
    from scipy.stats import t

    if len(values) < 2:
        return f"{values.mean():.3f}"
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
