"""NeMo-RL learns here: its own loops train a small Llama on a CPU in our environments, and the reward rises."""

import importlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from nemo_ext.chat.template import Template
from nemo_ext.job.config import compose
from nemo_ext.rl.job import run as run_job
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import arithmetic, schemas

pytestmark = pytest.mark.nemo_rl

TEMPLATE = "llama_nemotron"
MAKERS = {"math": arithmetic, "structured_output": schemas}
SPECIAL = ("<pad>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
EASY = re.compile(r"[0-3] \+ [0-3]\?")
STEPS, PROMPTS, GENERATIONS = 60, 8, 8


def tasks(count: int, seed: int) -> list[Task]:
    """As many of arithmetic as of JSON, those alone that so small a model can do: sums up to 3 + 3, books and films."""
    sums = (task for task in arithmetic.tasks(10 * count, seed=seed, level=1) if EASY.search(task.prompt[0].content))
    objects = (task for task in schemas.tasks(10 * count, seed=seed, level=1) if "There is a recipe" not in task.prompt[0].content and "title" in task.prompt[0].content)
    return [task for pair in itertools.islice(zip(sums, objects, strict=False), count) for task in pair]


def solved(task: Task) -> str:
    return MAKERS[task.environment].solution(task)


def make_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    digits, byte = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[-1]
    )
    return tokenizer


def make_model(folder: Path, steps: int) -> Path:
    """A Llama of two layers after a little SFT: it knows the forms of the answers, and some of the answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    examples = tasks(400, seed=1)
    prompts = Prompts.load(TEMPLATE, eos=SPECIAL[-1])
    texts = [(prompts.prompt(prompts.in_mode(task))[0], solved(task) + SPECIAL[-1]) for task in examples]
    tokenizer = make_tokenizer([text for pair in texts[:100] for text in pair])
    tokenizer.chat_template = Template.load(TEMPLATE).source
    ids = [[tokenizer(text, add_special_tokens=False).input_ids for text in pair] for pair in texts]
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=512, **sizes, **ends
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    random = np.random.default_rng(1)
    for _ in range(steps):
        # Sums are short and there are a hundred of them; objects are long, and any that fits the schema will do.
        for kind, rows in ((0, 24), (1, 12)):
            batch = [ids[2 * at + kind] for at in random.choice(len(ids) // 2, rows)]
            whole = [torch.tensor(before + after) for before, after in batch]
            tokens = pad_sequence(whole, batch_first=True)
            labels = pad_sequence(whole, batch_first=True, padding_value=-100)
            for row, (before, _) in zip(labels, batch, strict=True):
                row[: len(before)] = -100
            model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import os

    if os.environ.get("SMALL"):
        return Path(os.environ["SMALL"])
    return make_model(tmp_path_factory.mktemp("small"), 150)


@pytest.fixture(scope="session")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(task.record()) + "\n" for task in tasks(STEPS * PROMPTS // 2, seed=2)))
    return path


def grpo(model: Path, run_dir: Path, task_file: Path, *words: str, steps: int = STEPS, seed: int = 1) -> None:
    run_job(
        compose(
            "rl",
            [
                *("preset=rl_zero", f"model={model}", f"run_dir={run_dir}", f"seed={seed}", "on_inexpressible=warn"),
                *(f"tasks.train.path={task_file}", f"tasks.train.seed={seed}"),
                "environments={math: {}, structured_output: {}}",
                *(f"rl.prompts_per_step={PROMPTS}", f"rl.generations_per_prompt={GENERATIONS}"),
                *(f"rl.batch={PROMPTS * GENERATIONS}", f"micro_batch={PROMPTS * GENERATIONS}"),
                "rl.lengths={prompt: 256, response: 48}",
                "rl.sampling={drop_zero_variance: false, max_batches: null}",
                *(f"rl.optimizer.learning_rate={__import__('os').environ['LR']}", f"rl.schedule={{kind: constant, steps: {steps}}}"),
                *words,
            ],
        )
    )


NEMO_RL = ("engine=nemo_rl", "nemo_rl.backend=dtensor", "rl.validation.every=null", "nemo_rl.set.logger.monitor_gpus=false")


def with_nemo_rl(on_cpu: ModuleType, model: Path, run_dir: Path, task_file: Path, *words: str, **numbers: int) -> Any:
    """What a run logged, by prefix and step."""
    grpo(model, run_dir, task_file, *NEMO_RL, *words, **numbers)
    return on_cpu.KEPT[-1].logged


def with_trl(model: Path, run_dir: Path, task_file: Path, seed: int) -> list[float]:
    """Mean reward of each step."""
    grpo(model, run_dir, task_file, "engine=trl", "memory_profile=null", "save_every=100000", seed=seed)
    logged = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["reward"] for line in logged if "reward" in line]


@pytest.mark.slow
def test_it_learns(on_cpu: ModuleType, small_model: Path, task_file: Path, tmp_path: Path) -> None:
    import os
    t=__import__("time").time()
    if not os.environ.get("TRLONLY"):
        logged = with_nemo_rl(on_cpu, small_model, tmp_path / "run", task_file, f"rl.optimizer.learning_rate={os.environ['LR']}")
        print("NEMO", [round(logged["train", step]["reward"],2) for step in range(1, STEPS + 1)])
        print("NEMO", __import__("time").time()-t)
    t=__import__("time").time()
    print("TRL", [round(x,2) for x in with_trl(small_model, tmp_path / "trl", task_file, 1)])
    print("TRL", __import__("time").time()-t)
