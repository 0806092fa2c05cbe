"""Computations of our trainers that replace TRL's, without a model."""

import json
import math
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_ext.chat.template import names
from nemo_ext.rl.algorithms import Advantage, load
from nemo_ext.rl.pairs import read_pairs
from nemo_ext.rl.prompts import Prompts

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
ONE_OF_EACH = {("trl", "hm", "llama_nemotron"), ("nemo_rl", None, "domyn")}


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (Advantage(baseline="leave_one_out", normalise="none"), [1, -1 / 3, -1 / 3, -1 / 3]),
        (Advantage(baseline="leave_one_out", normalise="unbiased_std"), [2, -2 / 3, -2 / 3, -2 / 3]),
        (Advantage(baseline="mean", normalise="std"), [3**0.5, *[-(3**-0.5)] * 3]),
        (None, [7, 7, 7, 7]),
    ],
)
@pytest.mark.parametrize("process", [0, 1])
def test_advantages_are_those_of_the_algorithm(
    advantage: Advantage | None, expected: list[float], process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of four on two processes; the first group has no variance."""
    import torch
    from trl import GRPOTrainer

    from nemo_ext.rl.trl.trainers import _Grpo

    def score(self: Any, inputs: list[Any]) -> dict[str, Any]:
        self._calculate_rewards()
        return {"advantages": torch.full((4,), 7.0)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", score)
    rewards = torch.tensor([[0.1]] * 4 + [[1.0], [0.0], [0.0], [0.0]])
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self: rewards)
    trainer = _Grpo.__new__(_Grpo)
    trainer.model, trainer.num_generations, trainer.advantage = SimpleNamespace(training=True), 4, advantage
    trainer.accelerator = SimpleNamespace(process_index=process)

    made = trainer._generate_and_score_completions([])["advantages"]

    flat = [0.0] * 4 if advantage else [7.0] * 4
    assert made.tolist() == pytest.approx(expected if process else flat, rel=1e-4)


def bare(**attributes: Any) -> Any:
    """Trainer without a model, on one process."""
    from collections import defaultdict

    from nemo_ext.rl.trl.trainers import _Grpo

    trainer = _Grpo.__new__(_Grpo)
    trainer.accelerator, trainer.model = SimpleNamespace(gather=lambda tensor: tensor), SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def test_only_the_malformed_turns_of_a_conversation_are_penalised() -> None:
    import torch

    from nemo_ext.rl.algorithms import Penalties

    # Turns by their first token: 1 is well formed, 2 has malformed thinking, 3 a malformed call, 4 both.
    faults = {1: (False, False), 2: (True, False), 3: (False, True), 4: (True, True)}
    seen: list[tuple[list[int], list[int]]] = []

    def judged(before: list[int], response: list[int]) -> tuple[bool, bool]:
        seen.append((before, response))
        return faults[response[0]]

    batch = {
        "prompt_ids": torch.tensor([[0, 9], [8, 9]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[2, 5, 7, 1, 5], [3, 7, 4, 5, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]]),
        "advantages": torch.tensor([0.5, -0.5]),
    }
    trainer = bare(penalties=Penalties(thinking=-2.0, tool_call=-3.0), rollouts=SimpleNamespace(faults=judged))

    advantages = trainer._penalised(batch)

    assert advantages.tolist() == [[-2, -2, 0.5, 0.5, 0.5], [-3, -0.5, -3, -3, -0.5]]
    assert seen == [([9], [2, 5]), ([9, 2, 5, 7], [1, 5]), ([8, 9], [3]), ([8, 9, 3, 7], [4, 5])]
    metrics = trainer._metrics["train"]
    assert metrics["guards/malformed_thinking"] == metrics["guards/malformed_tool_calls"] == [0.5]


def test_responses_above_the_limit_are_excluded_and_bounds_are_counted() -> None:
    import torch

    differences = torch.tensor([[0.1, -0.1, 0.0], [1.5, 1.5, 9.0], [float("nan"), 0.0, 0.0]])
    batch: dict[str, Any] = {
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]),
        "sampling_per_token_logps": -differences,
        "old_per_token_logps": torch.zeros(3, 3),
        "num_items_in_batch": torch.tensor(7),
    }
    trainer = bare(use_vllm=True, loss=load("olmo_rl").loss)  # type: ignore[union-attr]

    trainer._log_mismatch(batch)
    trainer._exclude(batch, 2.0)

    metrics = trainer._metrics["train"]
    mean = (2 * math.exp(0.1) + 1 + 2 * math.exp(1.5) + 2) / 7
    assert metrics["guards/mismatch"] == [pytest.approx(mean)]
    assert metrics["guards/outside_bounds"] == [pytest.approx(2 / 7)]  # exp(1.5) is above the cap of 2
    assert metrics["guards/masked_responses"] == [pytest.approx(1 / 3)]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert int(batch["num_items_in_batch"]) == 5


@pytest.mark.parametrize("process", [0, 1])
def test_a_loss_per_group_scales_advantages_by_the_tokens_of_all_processes(
    process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of two on two processes; the second has four times the tokens."""
    import torch
    from trl import GRPOTrainer

    from nemo_ext.rl.trl.trainers import _Grpo

    mask = (torch.arange(9) < torch.tensor([1, 2, 9, 4])[:, None]).int()
    local = slice(2 * process, 2 * process + 2)
    batch = {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": mask[local]}
    batch["tool_mask"] = (torch.arange(9) < 8).int().expand(2, 9)  # one token is an observation
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: dict(batch))
    trainer = _Grpo.__new__(_Grpo)
    trainer.model, trainer.num_generations, trainer.by_group = SimpleNamespace(training=True), 2, True
    trained = (mask * (torch.arange(9) < 8)).sum(dim=1)
    trainer.accelerator = SimpleNamespace(process_index=process, gather=lambda tokens: trained)

    made = trainer._generate_and_score_completions([])["advantages"]

    factor = 15 / 2 / (12 if process else 3)
    assert made.tolist() == pytest.approx([factor, -factor])


@pytest.mark.parametrize(
    ("form", "trace", "template"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each in ONE_OF_EACH else pytest.mark.deep)
        for each in product(("trl", "nemo_rl"), (None, "hm"), names())
    ],
)
def test_both_engines_train_on_the_same_tokens(
    form: str, trace: str | None, template: str, model: Path, tmp_path: Path
) -> None:
    """For a file with a system message and an earlier turn; TRL's tokens come from its own collator."""
    from transformers import AutoTokenizer

    from nemo_ext.rl.nemo_rl.data import PairDataset
    from nemo_ext.rl.trl.trainers import preference

    context = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    thought = {} if trace is None else {"reasoning_content": trace}
    sides = [[{"role": "assistant", "content": content, **thought}] for content in ("four", "5")]
    record = (
        dict(zip(("prompt", "chosen", "rejected"), (context, *sides), strict=True))
        if form == "trl"
        else {"context": context, "completions": [{"rank": n, "completion": side} for n, side in enumerate(sides)]}
    )
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(record) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts.from_tokenizer(tokenizer, template)
    settings = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False}

    trainer = preference(
        load("dpo_delta", {"schedule": {"steps": 1, "epochs": None}}),
        str(model),
        settings,
        tokenizer,
        prompts,
        {"train": path},
    )
    batch = trainer.data_collator([trainer.train_dataset[0]])

    datum = PairDataset(read_pairs(path, prompts), tokenizer, max_length=None)[0]
    for row, side in enumerate(("chosen", "rejected")):
        prompt, answer = (message["token_ids"].tolist() for message in datum[f"message_log_{side}"])
        real = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][real].tolist() == prompt + answer
        assert batch["completion_mask"][row][real].tolist() == [0] * len(prompt) + [1] * len(answer)
    text = tokenizer.decode(batch["input_ids"][0])
    assert ("hm" in text) == (trace is not None)
    if template == "llama_nemotron":
        assert f"detailed thinking {'off' if trace is None else 'on'}" in text


@pytest.mark.parametrize("adapters", [False, True])
def test_equal_prompts_are_computed_once_with_the_same_gradients(adapters: bool) -> None:
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from nemo_ext.rl.trl.trainers import _scored, _with_shared_prompts

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, tie_word_embeddings=True, **sizes))
    add_fused_lm_head(model)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    inner = _with_shared_prompts(model.train(), Accelerator(cpu=True))
    lengths: list[int] = []
    inner.get_input_embeddings().register_forward_hook(lambda module, args, out: lengths.append(args[0].numel()))
    # Prompts of six tokens, two of them padded on the left, in the order of a shuffled batch; five tokens of responses.
    prompts = torch.randint(1, 64, (2, 6))[[0, 1, 1, 0]]
    mask = torch.ones(4, 11, dtype=torch.long)
    mask[[1, 2], :2] = 0
    mask[3, 9:] = 0
    ids = torch.cat([prompts, torch.randint(1, 64, (4, 5))], 1) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :6] = -100

    def result(shared: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        words = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
        out = _scored(model, inner, 6, **words) if shared else model(**words)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        logps = out.log_probs[:, -5:]
        return logps.detach(), list(torch.autograd.grad((logps * torch.arange(5)).sum(), weights))

    (plain, gradients), (logps, shared) = result(False), result(True)

    assert lengths == [4 * 11, 2 * 5, 4 * 6]
    torch.testing.assert_close(logps, plain)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients)
    torch.testing.assert_close(shared, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["convolutions", "router losses"])
def test_prompts_are_computed_for_each_row_if_a_model_needs_all_of_them(kind: str) -> None:
    import torch
    from accelerate import Accelerator
    from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from nemo_ext.rl.trl.trainers import _scored, _with_shared_prompts

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    torch.manual_seed(0)
    model: Any = (
        Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **sizes))
        if kind == "convolutions"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(output_router_logits=True, **experts, **sizes))
    )
    add_fused_lm_head(model)
    inner = _with_shared_prompts(model.eval(), Accelerator(cpu=True))
    ids = torch.cat([torch.randint(1, 64, (1, 6)).repeat(2, 1), torch.randint(1, 64, (2, 5))], 1)
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "fused_lm_head": True}

    with torch.no_grad():
        torch.testing.assert_close(_scored(model, inner, 6, **words).log_probs, model(**words).log_probs)
