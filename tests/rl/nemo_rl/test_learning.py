"""Learning with NeMo-RL's own loops: a small Llama on a CPU in our environments, whose reward rises."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import t
from torch.nn.utils.rnn import pad_sequence

from nemo_ext.chat.template import Template
from nemo_ext.job.config import compose
from nemo_ext.rl.job import run as run_job
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import arithmetic, schemas
from tests.json_lines import write_jsonl

pytestmark = pytest.mark.nemo_rl

TEMPLATE = "llama_nemotron"
MAKERS = {"math": arithmetic, "structured_output": schemas}
SPECIAL = ("<pad>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
EASY = re.compile(r"[0-3] \+ [0-3]\?")
STEPS, PROMPTS, GENERATIONS = 60, 8, 8
PAIR_STEPS, PAIRS, BETA = 6, 16, 0.1
ASYNCHRONOUS = (
    *("rl.asynchronous={max_age: 1, in_flight: false}", "nemo_rl.set.cluster.gpus_per_node=2"),
    *("nemo_rl.set.policy.generation.colocated.resources.gpus_per_node=1", "rl.prompts_per_step=4", "rl.batch=32"),
)


def tasks(count: int, seed: int) -> list[Task]:
    """Equal numbers of arithmetic and JSON tasks that a small model can solve: sums up to 3 + 3, books and films."""
    sums, objects = (made.tasks(10 * count, seed=seed, level=1) for made in MAKERS.values())
    easy = (task for task in sums if EASY.search(task.prompt[0].content))
    titled = (task for task in objects if re.match("There is a (book|film)", task.prompt[0].content))
    return [task for pair in itertools.islice(zip(easy, titled, strict=False), count) for task in pair]


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


def make_model(folder: Path, steps: int, *, start: Path | None = None, rows: tuple[int, int] = (24, 12)) -> Path:
    """Llama of two layers after a little SFT, which knows the format of the answers and some answers.

    Args:
        folder: folder for model and tokenizer.
        steps: number of steps of SFT.
        start: folder of the model to start from; None for a random one.
        rows: numbers of sums and of objects per step.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    examples = tasks(400, seed=1)
    prompts = Prompts.load(TEMPLATE, eos=SPECIAL[-1])
    texts = [(prompts.prompt(prompts.in_mode(task))[0], solved(task) + SPECIAL[-1]) for task in examples]
    if start is None:
        tokenizer = make_tokenizer([text for pair in texts[:100] for text in pair])
    else:
        tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = Template.load(TEMPLATE).source
    ids = [[tokenizer(text, add_special_tokens=False).input_ids for text in pair] for pair in texts]
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=512, **sizes, **ends
    )
    model = LlamaForCausalLM(config) if start is None else LlamaForCausalLM.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    random = np.random.default_rng(1)
    for _ in range(steps):
        # Sums are short and there are a hundred of them; objects are long, and any that fits the schema will do.
        for kind, count in enumerate(rows):
            if not count:
                continue
            batch = [ids[2 * at + kind] for at in random.choice(len(ids) // 2, count)]
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
    return make_model(tmp_path_factory.mktemp("small"), 120)


@pytest.fixture(scope="session")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tasks(STEPS * PROMPTS // 2, seed=2)
    return write_jsonl(tmp_path_factory.mktemp("tasks") / "tasks.jsonl", (task.record() for task in made))


@dataclass
class Runs:
    """Runs of `nemo-ext rl` in this process, with the same settings for both engines where possible."""

    policy: ModuleType
    folder: Path

    def start(self, engine: str, name: str, model: Path, *words: str, seed: int = 1, steps: int = STEPS) -> Path:
        own = {
            "nemo_rl": ("nemo_rl.backend=dtensor", "nemo_rl.set.logger.monitor_gpus=false"),
            "trl": ("memory_profile=null",),
        }
        run_dir = self.folder / name
        common = (
            *(f"engine={engine}", f"model={model}", f"run_dir={run_dir}", f"seed={seed}", "on_inexpressible=warn"),
            *("rl.validation={every: null, keep_best: null}", f"save_every={STEPS}", *own[engine]),
            f"rl.schedule={{kind: constant, steps: {steps}, epochs: null, examples: null, warmup_share: null}}",
        )
        run_job(compose("rl", [*common, *words]))
        return run_dir

    def nemo_rl(self, name: str, model: Path, *words: str, **numbers: int) -> dict[tuple[str, int], dict[str, Any]]:
        """Metrics of a run by prefix and step."""
        self.start("nemo_rl", name, model, *words, **numbers)
        logged: dict[tuple[str, int], dict[str, Any]] = self.policy.KEPT[-1].logged
        return logged

    def trl(self, name: str, model: Path, key: str, *words: str, **numbers: int) -> np.ndarray:
        """Values of a metric by step."""
        run_dir = self.start("trl", name, model, *words, **numbers)
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return np.array([line[key] for line in lines if key in line])


@pytest.fixture
def runs(on_cpu: ModuleType, tmp_path: Path) -> Runs:
    return Runs(on_cpu, tmp_path)


def grpo(
    path: Path, environments: str = "{math: {}, structured_output: {}}", prompts: int = PROMPTS, seed: int = 1
) -> tuple[str, ...]:
    return (
        *("preset=rl_zero", f"tasks.train.path={path}", f"tasks.train.seed={seed}"),
        *(f"environments={environments}", f"rl.prompts_per_step={prompts}"),
        *(f"rl.generations_per_prompt={GENERATIONS}", f"rl.batch={prompts * GENERATIONS}"),
        *(f"micro_batch={prompts * GENERATIONS}", "rl.lengths={prompt: 256, response: 48}"),
        *("rl.sampling={drop_zero_variance: false, max_batches: null}", "rl.optimizer.learning_rate=1e-3"),
    )


def of(logged: Mapping[tuple[str, int], Mapping[str, Any]], key: str, prefix: str = "train") -> np.ndarray:
    """Values of a metric by step."""
    steps = sorted(step for name, step in logged if name == prefix)
    return np.array([float(logged[prefix, step][key]) for step in steps])


def test_a_resumed_run_is_bit_identical(runs: Runs, tiny_llama: Path, tmp_path: Path) -> None:
    """With real weights, optimizer, dataloader and rollouts, resumed after two steps."""
    from transformers import AutoModelForCausalLM

    train, valid = (
        write_jsonl(tmp_path / f"{name}.jsonl", (task.record() for task in arithmetic.tasks(8, seed=seed, level=1)))
        for seed, name in enumerate(("train", "valid"))
    )
    words = (
        # A random model is never correct: its rewards come from lengths.
        *grpo(train, "{math: {reward: domyn_math}}", prompts=2),
        *(f"tasks.validation.path={valid}", "rl.validation={every: 2, keep_best: null}"),
        *("rl.group={length_control: {answer: 0.5}}", "nemo_rl.set.grpo.val_batch_size=8"),
        "rl.lengths={prompt: 256, response: 8}",
    )

    whole = runs.nemo_rl("whole", tiny_llama, *words, steps=4)
    begun = runs.nemo_rl("parts", tiny_llama, *words, steps=2)
    resumed = runs.nemo_rl("parts", tiny_llama, *words, steps=4)

    for key in ("loss", "reward", "grad_norm", "mean_gen_tokens_per_sample"):
        assert [*of(begun, key), *of(resumed, key)] == of(whole, key).tolist()
    assert (of(whole, "grad_norm") > 0).all()
    # Generation and policy give the same log-probabilities: every refit arrived.
    assert of(whole, "token_mult_prob_error") == pytest.approx(1, abs=1e-3)
    assert ("validation", 2) in whole and ("validation/environments", 4) in resumed
    first, one, two = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tiny_llama, tmp_path / "whole/model", tmp_path / "parts/model")
    )
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=0)
    assert any((value != first[name]).any() for name, value in one.items())


@pytest.mark.parametrize("drops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_that_teaches_nothing_loses_its_weight(
    drops: bool, runs: Runs, tiny_llama: Path, tmp_path: Path
) -> None:
    """Tasks for two words, which a random model sometimes writes, and for 99, which do not fit in a response."""
    for name, least in (("hope", 2), ("vain", 99)):
        rule = {"id": "length_constraints:number_words", "kwargs": {"num_words": least, "relation": "at least"}}
        reference = {"instructions": [rule], "mode": "all"}
        task = {"environment": "instructions", "thinking": False, "reference": reference}
        write_jsonl(
            tmp_path / f"{name}.jsonl", ({"id": f"{name}{n}", "prompt": f"{name} {n}", **task} for n in range(9))
        )
    train = f"tasks.train={{directory: {tmp_path}, blend: {{hope: 1, vain: 1}}, adapt: {{keep: 0.2, groups: 2}}}}"
    words = [word for word in grpo(tmp_path, "{instructions: {}}", prompts=4) if not word.startswith("tasks.")]
    words += [train, "rl.lengths={prompt: 256, response: 8}"]
    words += ["rl.sampling={drop_zero_variance: true, max_batches: 9}"] * drops

    whole = runs.nemo_rl("whole", tiny_llama, *words, steps=4)
    begun = runs.nemo_rl("parts", tiny_llama, *words, steps=2)
    resumed = runs.nemo_rl("parts", tiny_llama, *words, steps=4)

    weights = of(whole, "weight/vain", "adaptive")
    assert len(weights) == 4 and weights[0] == 0.5 and weights[-1] < 0.3
    assert of(whole, "signal/vain", "adaptive")[-1] < 0.2 < 0.4 < of(whole, "signal/hope", "adaptive")[-1]
    for key in ("weight/hope", "weight/vain", "signal/hope", "signal/vain"):
        parts = [*of(begun, key, "adaptive"), *of(resumed, key, "adaptive")]
        assert parts == of(whole, key, "adaptive").tolist()
    for key in ("loss", "reward", "grad_norm"):
        assert [*of(begun, key), *of(resumed, key)] == of(whole, key).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True], ids=["all groups", "without equal rewards"])
def test_asynchronous_steps(runs: Runs, small_model: Path, task_file: Path, drops: bool) -> None:
    sampling = ("rl.sampling={drop_zero_variance: true, max_batches: 20}",) if drops else ()
    logged = runs.nemo_rl("run", small_model, *grpo(task_file), *ASYNCHRONOUS, *sampling, steps=3)

    assert len(of(logged, "reward")) == 3
    # The first step's samples are of the weights that are trained; later ones may be a step old.
    assert of(logged, "token_mult_prob_error")[0] == pytest.approx(1, abs=1e-3)
    assert (of(logged, "grad_norm") > 0).all()
    if drops:
        kept, dropped = (of(logged, key, "train/dynamic_sampling") for key in ("kept", "dropped"))
        assert (kept == 4).all() and dropped.sum() > 0
        assert ((of(logged, "reward") > 0) & (of(logged, "reward") < 1)).all()


@pytest.mark.slow
def test_rloo_sums_over_a_response(runs: Runs, small_model: Path, task_file: Path) -> None:
    """The loss matches the plain formula on the batch that NeMo-RL logged.

    The rendered config has packed sequences, which DTensor's worker would take from the batch; the policy here packs
    nothing and takes three micro-batches of 8.
    """
    words = [word for word in grpo(task_file, prompts=3) if not word.startswith(("preset=", "micro_batch="))]
    logged = runs.nemo_rl("run", small_model, "preset=rloo_if", "micro_batch=8", *words, steps=1)

    rendered = yaml.safe_load((runs.folder / "run/checkpoints/step_1/config.yaml").read_text())
    assert rendered["policy"]["train_micro_batch_size"] == 8
    (file,) = runs.folder.rglob("train_data_step1.jsonl")
    keys = ("advantages", "prev_logprobs", "token_loss_mask")
    lines = map(json.loads, file.read_text().splitlines())
    rows = [{key: line[key][0] for key in keys} for line in lines]  # a line is a batch of one
    sums = [-sum(map(np.prod, zip(*row.values(), strict=True))) for row in rows]
    lengths = [sum(row["token_loss_mask"]) for row in rows]
    assert len(rows) == 3 * GENERATIONS and len(set(lengths)) > 3
    assert of(logged, "loss") == pytest.approx([np.mean(sums)], rel=1e-3)
    assert abs(np.mean(sums)) > 10 * abs(np.sum(sums) / np.sum(lengths))  # which level=token would have been


@pytest.mark.slow
def test_the_reward_rises(runs: Runs, small_model: Path, task_file: Path) -> None:
    logged = runs.nemo_rl("run", small_model, *grpo(task_file))

    reward = of(logged, "reward")
    assert len(reward) == STEPS
    assert reward[-20:].mean() > reward[:10].mean() + 0.05


def noisy(model: Path, folder: Path, seed: int, scale: float = 0.2) -> Path:
    """A model with noise, whose deviation is `scale` times each weight's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=random)
    teacher.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_teachers_on_the_policys_own_answers(
    runs: Runs, small_model: Path, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers of the two environments are the policy with noise; NeMo-RL routes, scores and trains."""
    opd = pytest.importorskip("nemo_rl.algorithms.opd")
    places = {name: noisy(small_model, tmp_path / name, seed) for seed, name in enumerate(MAKERS)}
    monkeypatch.setattr(opd, "reserve_teacher_clusters", lambda *arguments, **keywords: {})
    monkeypatch.setattr(opd, "create_teacher_worker_groups", runs.policy.teachers)
    teachers = ", ".join(f"{name}: {place}" for name, place in places.items())
    words = [word for word in grpo(task_file, prompts=4) if not word.startswith(("preset=", "rl.sampling"))]

    logged = runs.nemo_rl(
        "run",
        small_model,
        *("preset=opd", f"rl.distillation.teachers={{{teachers}, default: null}}", *words, *ASYNCHRONOUS[:1]),
        *("nemo_rl.set.cluster={num_nodes: 4, gpus_per_node: 1}", "rl.optimizer.learning_rate=3e-4"),
        steps=20,
    )

    gap = of(logged, "on_policy_distillation/teacher_student_logprob_gap_mean")
    assert len(gap) == 20
    assert -gap[:4].mean() > 0 and -gap[-8:].mean() < -0.6 * gap[:4].mean()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that contains one more value with 95 %, by Student's t."""
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) * (1 + 1 / len(values)) ** 0.5
    return float(np.mean(values) - half), float(np.mean(values) + half)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs of correct answers and refusals, with true rewards."""
    made = tasks(PAIR_STEPS * PAIRS // 2, seed=3)
    rows = [(message_of(task), solved(task), "I do not know.") for task in made]
    said = [(user, *([{"role": "assistant", "content": text}] for text in texts)) for user, *texts in rows]
    return write_jsonl(
        tmp_path / "pairs.jsonl",
        (
            {
                "context": user,
                "completions": [
                    {"rank": rank, "completion": side, "reward": 1.0 - rank} for rank, side in enumerate(sides)
                ],
            }
            for user, *sides in said
        ),
    )


def message_of(task: Task) -> list[dict[str, str]]:
    return [{"role": "user", "content": task.prompt[-1].content}]


def preference(preset: str, path: Path) -> tuple[str, ...]:
    return (
        *(f"preset={preset}", f"pairs.train={path}", f"rl.batch={PAIRS}", f"micro_batch={PAIRS}"),
        *("rl.lengths={total: 320}", "rl.optimizer.learning_rate=3e-4", f"template={TEMPLATE}", f"rl.loss.beta={BETA}"),
    )


@pytest.mark.slow
def test_dpo_ends_where_trl_does(runs: Runs, small_model: Path, pairs: Path) -> None:
    words = preference("dpo_delta", pairs)
    trl = [runs.trl(f"trl{seed}", small_model, "loss", *words, seed=seed, steps=PAIR_STEPS) for seed in range(1, 4)]
    logged = runs.nemo_rl("run", small_model, *words, steps=PAIR_STEPS)

    loss = of(logged, "loss")
    assert loss[0] == pytest.approx(np.log(2), abs=1e-4) == trl[0][0]
    low, high = interval([each[-3:].mean() for each in trl])
    assert low <= loss[-3:].mean() <= high
    assert of(logged, "accuracy")[-3:].mean() > 0.9


@pytest.mark.slow
def test_rpo_fits_the_true_margin(runs: Runs, small_model: Path, pairs: Path) -> None:
    words = ("rl.loss.eta=2.0", "rl.loss.distance=squared")

    logged = runs.nemo_rl("run", small_model, *preference("rpo_offline", pairs), *words, steps=PAIR_STEPS)

    assert of(logged, "loss")[0] == pytest.approx(4, rel=1e-3)  # a margin of 0, where eta times 1 is wanted
    margins = BETA * (of(logged, "rewards_chosen_mean") - of(logged, "rewards_rejected_mean"))
    assert margins[-2:] == pytest.approx(2, abs=0.5)
