"""TRL's trainers with our prompts, rewards, records and callbacks."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import batched, groupby
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import DynamicCache, LogitsProcessor, TrainerCallback, set_seed
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.trainer_callback import ExportableState
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer
from trl.trainer import utils as trl_utils
from trl.trainer.dpo_trainer import DataCollatorForPreference

from nemo_ext.chat.template import end_tokens
from nemo_ext.job.files import write_text
from nemo_ext.job.interrupts import SECONDS_OF_ONE, signals_to
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.records import json_line
from nemo_ext.job.seeds import digest
from nemo_ext.memory.sampler import Phases
from nemo_ext.rl.adaptive import signals_of
from nemo_ext.rl.algorithms import Advantage, Penalties, PolicyGradient, PolicyLoss, Preference
from nemo_ext.rl.pairs import read_pairs, token_ids, with_short_prompts
from nemo_ext.rl.plan import PlannedTasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.reprofile import Curricula
from nemo_ext.rl.rewards.advantages import group_advantages, group_factors, zero_variance
from nemo_ext.rl.rpo import Distance, rpo_loss
from nemo_ext.rl.task import Task
from nemo_ext.rl.teachers import divergence, divergences
from nemo_ext.rl.trl.render import make_config, scaled
from nemo_ext.rl.trl.rollouts import Rollout, Rollouts
from nemo_ext.rl.trl.teachers import Teachers, last_logits

if on_triton := getattr(trl_utils, "_use_triton", None):
    # On devices without Triton, TRL computes log-probabilities of prompts too, since a compiler needs constant shapes.
    trl_utils._use_triton = lambda device: device.type == "cpu" or on_triton(device)


class _Phased:
    """Trainer mixin that records validation and checkpoints as phases, since callbacks only report their ends."""

    phases = Phases(None)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        with self.phases.during("validation"):
            return super().evaluate(*arguments, **named)  # type: ignore[misc]

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        with self.phases.during("checkpoint"):
            super()._save_checkpoint(*arguments, **named)  # type: ignore[misc]


class Drawn(TrainerCallback, ExportableState):
    """Draws tasks for the trainer in cases where the step alone does not determine them.

    Every checkpoint stores the number of drawn tasks, so a resumed run draws the next ones.

    Args:
        saved: state from the checkpoint that the run resumes from; None at the start.
        process: number of this process, from 0.
        processes: number of processes, which draw equally many tasks.
    """

    def __init__(
        self, tasks: PlannedTasks, saved: Mapping[str, Any] | None = None, process: int = 0, processes: int = 1
    ) -> None:
        self.number = int(saved["number"]) if saved else 0
        self.shares = tasks.adaptive()
        if saved and self.shares is not None:
            self.shares.restore(saved["shares"])
        self._tasks, self._process, self._processes = tasks, process, processes
        self._datasets: list[int] = []

    def next(self, count: int) -> list[Task]:
        """Draw `count` tasks per process and return this process's.

        They follow the plan's order, or come from datasets that are drawn by their current shares if these adapt.
        """
        total, mine = count * self._processes, slice(count * self._process, count * (self._process + 1))
        first = self.number
        self.number += total
        if self.shares is None:
            return [self._tasks[number] for number in range(first, first + total)[mine]]
        places = self.shares.draw(total)
        self._datasets += [dataset for dataset, _ in places]
        return [self._tasks.nth(*place) for place in places[mine]]

    def learn(self, rewards: Sequence[float], generations: int) -> None:
        """Update adaptive shares from all processes' rewards, `[groups * generations]`, in the order of drawing."""
        if self.shares is None:
            return
        groups = np.reshape(rewards, (-1, generations))
        datasets, self._datasets = self._datasets[: len(groups)], self._datasets[len(groups) :]
        self.shares.learn(datasets, signals_of(groups))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in the form that the trainer saves."""
        state = {"number": self.number, "shares": None if self.shares is None else self.shares.state()}
        return {"args": state, "attributes": {}}


class _OurPrompts(_Phased):
    """Trainer mixin for prompts that are already rendered with the chat template, including special tokens.

    Attributes:
        drawn: source of tasks that replaces the dataset; None to use the dataset.
    """

    rollouts: Rollouts
    model: Any
    state: Any
    num_generations: int
    _metrics: dict[str, Any]
    accelerator: Any
    drawn: Drawn | None = None

    def log(self, *arguments: Any, **named: Any) -> None:
        # TRL averages over batches without weights, but the last one may be smaller, and with several processes has
        # tasks of earlier ones too.
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for task, reward in gather_object(self.rollouts.validated):
            rewards[task].append(reward)
        if rewards and "reward" in self._metrics["eval"]:
            self._metrics["eval"]["reward"] = [float(np.mean([np.mean(values) for values in rewards.values()]))]
        self.rollouts.validated.clear()
        super().log(*arguments, **named)  # type: ignore[misc]

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return self.rollouts.encoded(prompts), None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        with self.phases.during("generation" if self.model.training else "validation"):
            if not self.model.training or self.drawn is None:
                return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            shares = self.drawn.shares
            values = {f"weight/{name}": weight for name, weight in shares.weights.items()} if shares else {}
            inputs = [{"prompt": text} for text in self._next_prompts(len(inputs) // self.num_generations)]
            batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            values |= {f"signal/{name}": signal for name, signal in shares.signals.items()} if shares else {}
            for name, value in values.items():
                self._metrics["train"][f"adaptive/{name}"].append(value)
            return batch

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        generated = super()._generate(*arguments, **named)  # type: ignore[misc]
        if self.model.training:
            self.phases.begin("scoring")  # by verifiers and the reference model
        return generated

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *arguments: Any, **named: Any
    ) -> Any:
        inner = _with_shared_prompts(model, self.accelerator)
        if inner is not None and not named.get("compute_aux_loss"):
            model = partial(_scored, model, inner, input_ids.shape[1] - logits_to_keep)
        return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
            model, input_ids, attention_mask, logits_to_keep, *arguments, **named
        )

    def respond(self, prompts: list[str]) -> list[Rollout]:
        """Generate responses to prompts and verify them."""
        _, responses, *others = self._generate(prompts)
        extra = others[3] if len(others) > 3 else {}  # RLOO's trainer has no conversations
        return extra.get("rollout") or self.rollouts.verified(prompts, responses)

    def training_rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the rewards of generated groups, and update the adaptive shares from them."""
        rewards = self.rollouts.rewards(rollouts)
        if self.drawn is not None:
            self.drawn.learn(gather_object(rewards), self.num_generations)
        return rewards

    def record(self, rollouts: Sequence[Rollout], rewards: Sequence[float], *, dropped: bool = False) -> None:
        """Append rollouts and their rewards to the record; `dropped` marks rollouts that are not trained on."""
        step = self.state.global_step + 1
        lines = [
            {"step": step, **self.rollouts.line(rollout, reward)} | ({"dropped": True} if dropped else {})
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]
        with self.rollouts.record.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _next_prompts(self, count: int) -> list[str]:
        """Draw `count` tasks and return their prompts, each repeated once per response."""
        assert self.drawn is not None
        texts = map(self.rollouts.prompt, self.drawn.next(count))
        return [text for text in texts for _ in range(self.num_generations)]


class _Grpo(_OurPrompts, GRPOTrainer):
    """GRPO with advantages from `group_advantages`, which can replace groups without reward variance.

    Attributes:
        advantage: settings of advantages; None to use TRL's advantages.
        by_group: True for a mean over groups, each the mean over its tokens, instead of TRL's mean over all tokens.
        rounds: maximum number of generation rounds per step, including the first; after these, groups without variance
            are kept. None to keep all groups.
        start: initial model, for measuring the KL divergence in validations; None to skip this.
        clip: bound of an advantage's absolute value; None for none.
        penalties: advantages of malformed responses.
        loss: settings of the loss.
        sampled: log-probabilities of the newest responses from transformers, `[rows, tokens]` each; None to not record
            them.
        teachers: teachers whose log-probabilities replace advantages from rewards; None to learn from rewards.
        scored: prompts of the last batch whose rewards were computed, as text.
    """

    advantage: Advantage | None = None
    by_group: bool = False
    rounds: int | None = None
    start: Any = None
    clip: float | None = None
    penalties = Penalties()
    loss: PolicyLoss | None = None
    sampled: list[torch.Tensor] | None = None
    teachers: Teachers | None = None
    _earned: torch.Tensor
    scored: list[str]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training and not self.beta:
            # A validation needs only the rewards and the KL to the initial model.
            if self.start is not None:
                self._metrics["eval"]["kl"].append(self._kl_to_start(model, inputs))
            return torch.zeros((), device=self.accelerator.device)
        if self.teachers is not None and self.teachers.settings.logits is not None:
            return self._divergence(model, inputs, self.teachers)
        # Rows without advantage may be removed only if the loss is a mean over the batch's tokens, which does not count
        # rows, and if no other term (KL, entropy, router loss, entropy quantile) needs them. TRL's metrics need equally
        # many rows in all processes.
        others = self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1
        removable = self.loss_type == "dapo" and not others and self.accelerator.num_processes == 1
        batch = _trimmed(inputs, without_advantage=not removable)
        loss: torch.Tensor = super()._compute_loss(model, batch)
        self._log_mismatch(batch)
        return loss

    def _divergence(self, model: Any, inputs: Mapping[str, Any], teachers: Teachers) -> torch.Tensor:
        """Return the mean divergence from the teachers over the generated tokens of a training batch, in nats.

        Args:
            model: current policy.
            inputs: TRL's microbatch, with each row's index among the teachers' places in `teacher`, `[rows]`.
            teachers: the run's teachers.
        """
        settings = teachers.settings.logits
        assert settings is not None
        batch = _trimmed(inputs, without_advantage=True)
        ids, mask, width = _inputs(batch)
        ours, generated = last_logits(model, ids, mask, width), _generated(batch)
        total = ours.new_zeros(())
        for number, place in enumerate(teachers.settings.places.values()):
            rows = (batch["teacher"] == number).nonzero()[:, 0]
            if len(rows):
                theirs = teachers.logits(place, ids[rows], mask[rows], width)
                total = total + (divergence(ours[rows], theirs, settings) * generated[rows]).sum()
        # As TRL's loss over tokens: their number is that of the generation batch, of which this step trains on a part.
        steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        tokens = batch["num_items_in_batch"].clamp(min=1) * steps / self.accelerator.num_processes
        return total / tokens

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self._newest = result[0].detach()
        return result

    def _log_mismatch(self, batch: Mapping[str, Any]) -> None:
        """Log how far generation and training differ in a trained microbatch, from the loss's own log-probabilities."""
        if not self.model.training or "sampling_per_token_logps" not in batch:
            return
        policy = batch.get("old_per_token_logps")
        generated = _generated(batch)
        difference = _difference(self._newest if policy is None else policy, batch)
        values = {"mismatch": (difference.abs().exp() * generated).sum()}
        correction = None if self.loss is None else self.loss.importance_correction
        if self.use_vllm and correction is not None and correction.cap is not None:
            ratio = (difference if correction.level == "token" else difference.sum(dim=1, keepdim=True)).exp()
            outside = (ratio > correction.cap) | (ratio < (correction.floor or 0))
            values["outside_bounds"] = (outside * generated).sum()
        for name, value in values.items():
            total, tokens = self.accelerator.gather(torch.stack([value, generated.sum()])[None].double()).sum(dim=0)
            if tokens:
                self._metrics["train"][f"guards/{name}"].append(float(total / tokens))

    def _kl_to_start(self, model: Any, inputs: Mapping[str, Any]) -> float:
        """Estimate the KL divergence from the initial model in nats per response token (k3 estimator, as in TRL)."""
        total, tokens = 0.0, 0
        rows = self.args.per_device_train_batch_size
        for first in range(0, len(inputs["prompt_ids"]), rows):
            batch = {name: inputs[name][first : first + rows] for name in (*_TOKENS, "tool_mask") if name in inputs}
            batch = _trimmed(batch, without_advantage=True)
            current, initial = (self._logps(policy, *_inputs(batch)) for policy in (model, self.start))
            difference = (initial - current).double()
            generated = _generated(batch)
            total += float(((difference.exp() - difference - 1) * generated).sum())
            tokens += int(generated.sum())
        total, tokens = (sum(values) for values in zip(*gather_object([(total, tokens)]), strict=True))
        return total / max(1, tokens)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self._earned = super()._calculate_rewards(*arguments, **named)
        return self._earned

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if self.advantage is not None:
            # Rewards of all processes, since a group may be split between two.
            groups = self._earned.nansum(dim=1).view(-1, self.num_generations).double().cpu().numpy()
            advantages = group_advantages(groups, baseline=self.advantage.baseline, normalise=self.advantage.normalise)
            batch["advantages"] = self._of_this_process(advantages.reshape(-1), batch["advantages"])
        if self.teachers is not None and self.teachers.settings.logits is not None:
            numbers = {name: number for number, name in enumerate(self.teachers.settings.places)}
            names = [self.teachers.settings.teacher(self.rollouts.task(text)) for text in self.scored]
            batch["teacher"] = torch.tensor([numbers[name] for name in names], device=batch["advantages"].device)
        elif self.teachers is not None:
            batch["advantages"] = self._distilled(batch, self.teachers)
        if self.penalties.any:
            batch["advantages"] = self._penalised(batch)
        if self.clip is not None:
            batch["advantages"] = batch["advantages"].clamp(-self.clip, self.clip)
        if self.loss is not None and self.loss.mismatch is not None:
            self._exclude(batch, self.loss.mismatch)
        if self.by_group:
            advantages = batch["advantages"]
            counts = self.accelerator.gather(_generated(batch).sum(dim=1)).view(-1, self.num_generations).cpu().numpy()
            factors = self._of_this_process(np.repeat(group_factors(counts), self.num_generations), advantages)
            batch["advantages"] = advantages * factors.view(-1, *[1] * (advantages.dim() - 1))
        return batch

    def _of_this_process(self, values: Any, like: torch.Tensor) -> torch.Tensor:
        """Return the rows of this process among those of all processes, with the type and device of `like`."""
        first = self.accelerator.process_index * len(like)
        return torch.as_tensor(values)[first : first + len(like)].to(like)

    @torch.no_grad()
    def _logps(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        """Return a model's log-probabilities of responses, `[rows, width]`; see `_inputs`."""
        rows = self.args.per_device_train_batch_size
        logps: torch.Tensor = self._get_per_token_logps_and_entropies(model, ids, mask, width, batch_size=rows)[0]
        return logps

    def _exclude(self, batch: dict[str, Any], limit: float) -> None:
        """Exclude responses from the loss whose mean exp(|log p in training - in generation|) exceeds `limit`.

        The batch is changed in place. The limit is the setting `loss.mismatch`.
        """
        policy = batch.get("old_per_token_logps")
        policy = self._logps(self.model, *_inputs(batch)) if policy is None else policy
        generated = _generated(batch)
        lengths = generated.sum(dim=1)
        difference = _difference(policy, batch).abs()
        excluded = ((difference.exp() * generated).sum(dim=1) / lengths.clamp(min=1)) > limit
        batch["completion_mask"] = batch["completion_mask"] * ~excluded[:, None]
        batch["num_items_in_batch"] = self.accelerator.gather(_generated(batch).sum()).sum()
        counts = torch.stack([excluded.sum(), (lengths > 0).sum()])[None]
        count, responses = self.accelerator.gather(counts).sum(dim=0).tolist()
        self._metrics["train"]["guards/masked_responses"].append(count / max(1, responses))

    def _penalised(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the advantages of tokens, `[rows, tokens]`, with penalties, and log the shares of malformed turns."""
        generated = _generated(batch)
        advantages = batch["advantages"]
        advantages = (advantages if advantages.dim() == 2 else advantages[:, None]).expand(generated.shape).clone()
        counts = [0, 0, 0]
        for row, mask in enumerate(generated.bool().tolist()):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            tokens = batch["completion_ids"][row].tolist()
            end = 0
            for is_generated, run in groupby(mask):
                begin, end = end, end + len(list(run))
                if not is_generated:
                    continue
                faults = self.rollouts.faults((prompt + tokens[:begin])[-_TAIL:], tokens[begin:end])
                counts = [count + fault for count, fault in zip(counts, (True, *faults), strict=True)]
                for fault, penalty in zip(faults, (self.penalties.thinking, self.penalties.tool_call), strict=True):
                    if fault and penalty is not None:
                        advantages[row, begin:end] = penalty
        turns, thinking, calls = self.accelerator.gather(torch.tensor([counts], device=generated.device)).sum(dim=0)
        for name, count in (("malformed_thinking", thinking), ("malformed_tool_calls", calls)):
            self._metrics["train"][f"guards/{name}"].append(int(count) / max(1, int(turns)))
        return advantages

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        self.sampled = [] if self.model.training and not self.use_vllm else None
        responses, logprobs = super()._generate_single_turn(*arguments, **named)
        if logprobs is None and self.sampled:
            (rows,) = self.sampled
            logprobs = [row[: len(ids)] for row, ids in zip(rows.tolist(), responses, strict=True)]
        return responses, logprobs

    def _distilled(self, batch: Mapping[str, Any], teachers: Teachers) -> torch.Tensor:
        """Return the advantages of sampled tokens, `[rows, tokens]`, and log the KL divergence to each teacher."""
        ids, mask, width = _inputs(batch)
        names = [teachers.settings.teacher(self.rollouts.task(text)) for text in self.scored]
        policy = batch.get("old_per_token_logps")
        policy = self._logps(self.model, ids, mask, width) if policy is None else policy
        scored = teachers.logprobs(names, ids, mask, width, self._logps)
        generated = _generated(batch)
        sums = divergences(names, scored, policy, generated)
        for name in teachers.settings.places:
            counted = torch.tensor([sums.get(name, (0.0, 0))], dtype=torch.float64, device=ids.device)
            total, tokens = self.accelerator.gather(counted).sum(dim=0).tolist()
            if tokens:
                self._metrics["train"][f"teacher_kl/{name}"].append(total / tokens)
        advantages = (scored - policy) * generated
        clip = teachers.settings.clip
        return advantages if clip is None else advantages.clamp(-clip, clip)

    def _generate(self, prompts: list[str]) -> Any:
        if not self.model.training or self.rounds is None:
            return super()._generate(prompts)
        assert self.drawn is not None
        # A group of any process may replace a dropped one, so every process has all groups.
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        share = len(prompts) // self.num_generations
        required = share * processes
        varied: list[dict[str, Any]] = []
        flat: list[dict[str, Any]] = []
        rounds = 0
        while len(varied) < required and rounds < self.rounds:
            if rounds:
                self.phases.begin("generation")
                prompts = self._next_prompts(ceil((required - len(varied)) / processes))
            for group in gather_object(self._groups(prompts)):
                (flat if zero_variance(group["earned"]) else varied).append(group)
            rounds += 1
        left = max(0, required - len(varied))
        first_left = len(flat) - left
        dropped = [*flat[:first_left], *varied[required:]]
        if self.accelerator.is_main_process:
            for group in dropped:
                self.record(group["rollout"], group["earned"], dropped=True)
        values = {
            "dropped": len(dropped) / (len(varied) + len(flat)),
            "refill_rounds": rounds - 1,
            "left": left / required,
            "tasks_drawn": self.drawn.number,
        }
        for name, value in values.items():
            self._metrics["train"][f"zero_variance/{name}"].append(value)
        groups = [*varied[:required], *flat[first_left:]]
        return _merged(groups[process * share : (process + 1) * share])

    def _groups(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Generate and reward groups; return each group's columns by name, None for columns that TRL omits."""
        prompt_ids, responses, mask, texts, logprobs, extra, *_ = super()._generate(prompts)
        rollouts = extra.get("rollout") or self.rollouts.verified(prompts, responses)
        columns = {
            **dict(zip(_COLUMNS, (prompt_ids, responses, mask, texts, logprobs), strict=True)),
            "rollout": rollouts,
            "earned": self.training_rewards(rollouts),
        }
        return [
            {
                name: None if column is None else column[at : at + self.num_generations]
                for name, column in columns.items()
            }
            for at in range(0, len(prompts), self.num_generations)
        ]


def _inputs(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a batch's token ids of prompts and responses, their mask, `[rows, tokens]`, and the responses' width."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask, batch["completion_ids"].shape[1]


def _generated(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return a mask of a batch's generated tokens, `[rows, tokens]`, without observations and excluded responses."""
    mask: torch.Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask


def _difference(policy: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the policy's minus the generation's log-probabilities, `[rows, tokens]`; 0 where one is unknown."""
    return torch.nan_to_num(policy - batch["sampling_per_token_logps"], nan=0.0) * _generated(batch)


_TAIL = 16
"""Number of tokens before a response that are decoded to see whether they open a reasoning trace."""


def _trimmed(batch: Mapping[str, Any], *, without_advantage: bool) -> dict[str, Any]:
    """Return a microbatch without columns that are padding in every row, which leaves the loss unchanged.

    Rows without advantage are removed too, unless `without_advantage` is set; if no row has an advantage, one is kept.
    """
    rows, width = batch["completion_mask"].shape
    selected = torch.arange(rows, device=batch["completion_mask"].device)
    if not without_advantage and batch["advantages"].dim() == 1:
        nonzero = batch["advantages"].nonzero()[:, 0]
        selected = nonzero if len(nonzero) else selected[:1]
    begin = int(batch["prompt_mask"][selected].any(dim=0).int().argmax())
    end = max(1, width - int(batch["completion_mask"][selected].any(dim=0).flip(0).int().argmax()))
    trimmed = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != rows:
            continue
        value = value[selected]
        if name in ("prompt_ids", "prompt_mask"):
            value = value[:, begin:]
        elif value.dim() == 2 and value.shape[1] == width:
            value = value[:, :end]
        trimmed[name] = value
    return trimmed


_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_COLUMNS = ("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs")
"""Names of the columns that TRL's `_generate` returns, in order."""


def _merged(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Join groups into the tuple that TRL's `_generate` returns; its extra columns go to the reward function."""

    def column(name: str) -> list[Any] | None:
        parts = [group[name] for group in groups]
        return None if parts[0] is None else [value for part in parts for value in part]

    extra = {name: column(name) for name in ("rollout", "earned")}
    return (*map(column, _COLUMNS), extra, None, [])


class _Rloo(_OurPrompts, RLOOTrainer):
    pass


class _Dpo(_Phased, DPOTrainer):
    def _prepare_dataset(self, dataset: Dataset, *arguments: Any, **named: Any) -> Dataset:
        return dataset  # already tokenized, in the same way for all engines


_SCORES = ("chosen_score", "rejected_score")
_MARGIN = "true_margin"


class _WithMargins:
    """Collator that adds the differences of the pairs' true rewards, `[pairs]`."""

    def __init__(self, collator: DataCollatorForPreference) -> None:
        self._collator = collator

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        margins = [pair["chosen_score"] - pair["rejected_score"] for pair in pairs]
        return {**self._collator(pairs), _MARGIN: torch.tensor(margins, dtype=torch.float32)}


class _Rpo(_Dpo):
    """RPO trainer, in which DPO's loss has weight 0 (`nemo_ext.rl.trl.render`); SFT loss and metrics are unchanged.

    The batch contains the reference log-probabilities (`precompute_ref_log_probs`).
    """

    data_collator: Any
    _signature_columns: list[str]

    def __init__(self, *, eta: float, distance: Distance, weight: float, **arguments: Any) -> None:
        self._eta, self._distance, self._weight = eta, distance, weight
        super().__init__(**arguments)
        self.data_collator = _WithMargins(self.data_collator)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*dict.fromkeys((*self._signature_columns, *_SCORES))]

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        true_margin = inputs.pop(_MARGIN)
        outputs_of_model: list[Any] = []

        def recorded(**arguments: Any) -> Any:
            outputs_of_model.append(model(**arguments))
            return outputs_of_model[-1]

        result = super()._compute_loss(recorded, inputs, return_outputs)
        loss, *outputs = result if return_outputs else (result,)
        tokens = inputs["completion_mask"].shape[1] - 1
        chosen, rejected = outputs_of_model[0].log_probs[:, -tokens:].sum(dim=1).chunk(2)
        margin = self.beta * ((chosen - inputs["ref_chosen_logps"]) - (rejected - inputs["ref_rejected_logps"]))
        losses = rpo_loss(margin, self._eta * true_margin.to(margin), self._distance)
        loss = loss + self._weight * losses.mean()
        return (loss, *outputs) if return_outputs else loss


def policy_gradient(
    algorithm: PolicyGradient,
    model: str,
    settings: Mapping[str, Any],
    tokenizer: Any,
    rollouts: Rollouts,
    train: PlannedTasks,
    validation: PlannedTasks | None,
    *,
    drawn: Mapping[str, Any] | None = None,
    teachers: Teachers | None = None,
    adapters: Any = None,
) -> GRPOTrainer | RLOOTrainer:
    """Create a GRPO or RLOO trainer on tasks.

    Args:
        train: the run's tasks; with `sampling.drop_zero_variance`, all tasks that may be drawn.
        drawn: state of `Drawn` from the checkpoint that the run resumes from; only used with
            `sampling.drop_zero_variance` or adaptive shares, where the step does not determine the next tasks.
        teachers: teachers of on-policy distillation; None for advantages from rewards.
        adapters: peft's config of low-rank adapters; None to train all weights.

    Raises:
        ValueError: TRL does not have a setting, or RLOO is used with a multi-turn environment.
    """
    arguments: dict[str, Any] = {}
    if rollouts.has_conversations:
        if algorithm.algorithm == "rloo":
            raise ValueError(
                "algorithm=rloo does not support environments with several turns in TRL; use algorithm=grpo"
            )
        arguments["rollout_func"] = _conversations
    fixed = {"remove_unused_columns": False, "shuffle_dataset": False, "ddp_find_unused_parameters": False}
    reward = _Reward(rollouts)
    trainer: Any = (_Grpo if algorithm.algorithm == "grpo" else _Rloo)(
        model=model,
        args=make_config(algorithm, {**fixed, **settings}),
        train_dataset=_dataset(rollouts, train, (algorithm.steps or 0) * algorithm.prompts_per_step),
        eval_dataset=None if validation is None else _dataset(rollouts, validation, len(validation)),
        reward_funcs=[reward],
        processing_class=tokenizer,
        peft_config=adapters,
        **arguments,
    )
    trainer.rollouts, reward.trainer = rollouts, trainer
    _end_at(trainer, end_tokens(tokenizer, rollouts.prompts.template, trainer.model.generation_config))
    if algorithm.algorithm == "grpo":
        # trl.scale_rewards=... takes precedence.
        if trainer.args.scale_rewards == scaled(algorithm):
            trainer.advantage = algorithm.advantage
        trainer.by_group = algorithm.loss.level == "group"
        trainer.rounds, trainer.teachers = algorithm.sampling.max_batches, teachers
        trainer.clip = None if algorithm.advantage is None else algorithm.advantage.clip
        trainer.penalties, trainer.loss = algorithm.penalties, algorithm.loss
        if algorithm.validation.kl and validation is not None and not trainer.beta:
            trainer.start = deepcopy(trainer.model).requires_grad_(False).eval()
    inner = trainer.model if adapters is None else trainer.model.get_base_model()  # which contains the adapters
    # After the copy above, because the trainer cannot be copied.
    trainer.model.generate = partial(_generate, inner, trainer)
    if getattr(trainer, "rounds", None) is not None or train.adaptive() is not None:
        _draw(trainer, train, drawn)
    if same := sorted(rollouts.same):
        notice(f"{len(same):,} tasks have the same prompt and reference as another task and count as it: {same[0]} ...")
    result: GRPOTrainer | RLOOTrainer = trainer
    return result


def _end_at(trainer: Any, ends: frozenset[int]) -> None:
    """Use the same end-of-response ids for generation, masks, verification and the saved model."""
    ids = sorted(ends)
    trainer.rollouts.ends = ends
    trainer.eos_token_ids = trainer.model.generation_config.eos_token_id = ids
    if trainer.use_vllm:
        trainer.vllm_generation.generation_kwargs.setdefault("stop_token_ids", ids)
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ids


class _Recorder(LogitsProcessor):
    """Records the log-probabilities of sampled tokens during transformers' generation, at the sampling temperature."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._sampled: list[torch.Tensor] = []
        self._following: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.recorded(input_ids)
        self._following = (scores.float() / self._temperature).log_softmax(dim=-1)
        return scores

    def recorded(self, ids: torch.Tensor) -> torch.Tensor:
        """Record the last token of `ids`, `[rows, tokens]`, and return the log-probabilities of all sampled tokens."""
        if self._following is not None:
            self._sampled.append(self._following.gather(1, ids[:, -1:]))
        return torch.cat(self._sampled, dim=1) if self._sampled else ids[:, :0].float()


def _generate(
    model: Any,
    trainer: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    generation_config: Any,
    **others: Any,
) -> torch.Tensor:
    """Call transformers' `generate` for a trainer and return token ids, `[rows, tokens]`.

    The log-probabilities of the sampled tokens are appended to the trainer's `sampled`, if it is a list. Equal prompts
    are computed once if the model can.
    """
    recorder = None if getattr(trainer, "sampled", None) is None else _Recorder(generation_config.temperature)
    others |= {"generation_config": generation_config, "logits_processor": [recorder] if recorder else []}
    # Autocast keeps its copies of the weights until its outermost block ends, which otherwise is each token's forward.
    with trainer.accelerator.autocast():
        if _with_shared_prompts(model, trainer.accelerator) is not None:
            others |= _prefilled(model, input_ids, attention_mask)
        ids: torch.Tensor = type(model).generate(model, input_ids=input_ids, attention_mask=attention_mask, **others)
    if recorder is not None:
        trainer.sampled.append(recorder.recorded(ids))
    return ids


def _with_shared_prompts(model: Any, accelerator: Any) -> Any:
    """Return the model inside wrappers and adapters; None if it cannot compute equal prompts once.

    It can if it reads a KV cache, does not recompute activations, which turns the cache off, and this is the only
    process, since wrappers for several expect one forward pass per step.
    """
    if accelerator.num_processes > 1:
        return None
    model = accelerator.unwrap_model(model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    recomputed = model.training and model.is_gradient_checkpointing
    reads_places = "position_ids" in signature(type(model).forward).parameters
    able = reads_places and _cache_name(model) and not model._is_stateful and not recomputed
    return model if able else None


def _scored(
    model: Any,
    inner: Any,
    width: int,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    **others: Any,
) -> Any:
    """Call a model on prompts with responses; outputs start at a prompt's last token if some prompts are equal.

    Positions do not count padding, as in generation.

    Args:
        model: model with TRL's forward pass, which returns log-probabilities of `labels`.
        inner: the model inside wrappers and adapters.
        width: number of tokens of prompts, which are padded on the left.
    """
    config = inner.config.get_text_config()
    routed = getattr(config, "output_router_logits", False)  # TRL's router loss reads the tokens of all rows
    prefix = {} if routed else _prefilled(inner, input_ids[:, :width], attention_mask[:, :width])
    begin = width - 1 if prefix else 0
    return model(
        input_ids=input_ids[:, begin:],
        attention_mask=attention_mask,
        labels=labels[:, begin:],
        position_ids=_positions(attention_mask)[:, begin:],
        **prefix,
        **others,
    )


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def _prefilled(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
    """Compute the KV cache of equal prompts once, and return it as an argument for the model or its `generate`.

    The result is empty if no prompts are equal, or if the model has other caches than of keys and values.
    """
    width = input_ids.shape[1]
    both, row = torch.unique(torch.cat([input_ids, attention_mask], 1), dim=0, return_inverse=True)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    of_attention = {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if len(both) < len(input_ids) and width > 1 and of_attention:
        prompts, masks = both[:, :width], both[:, width:-1]
        # The backbone alone, as TRL's replacement of `forward` calls the original model's in a copied model.
        model.base_model(
            input_ids=prompts[:, :-1],
            attention_mask=masks,
            position_ids=_positions(masks),
            use_cache=True,
            **{_cache_name(model): cache},
        )
        cache.batch_select_indices(row)
        return {_cache_name(model): cache}
    return {}


def _cache_name(model: Any) -> str:
    """Return the name of a model's cache argument, which depends on the version of transformers; "" for none."""
    parameters = signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), "")


def answer(
    trainer: GRPOTrainer | RLOOTrainer, tasks: Sequence[Task], record: Path, *, samples: int, at_once: int, seed: int
) -> None:
    """Generate and verify responses to tasks as in training, without training.

    A batch's responses depend only on the seed and the batch's number, so an interrupted run gives the same ones.

    Args:
        record: path of the JSONL file to append to; batches that are complete in it are not repeated.
        at_once: number of tasks per batch.
    """
    ours: Any = trainer
    ours.model.eval()
    ours.num_generations = ours.num_generations_eval = samples
    record.parent.mkdir(parents=True, exist_ok=True)
    existing = record.read_text().splitlines(keepends=True) if record.exists() else []
    batches = list(batched(tasks, at_once))
    complete = sum(line.endswith("\n") for line in existing)
    done = len(batches) if complete == samples * len(tasks) else complete // (samples * at_once)
    write_text(record, "".join(existing[: samples * sum(map(len, batches[:done]))]))
    with progress_of("pass rates:", len(tasks), unit="tasks") as advance:
        advance(sum(map(len, batches[:done])))
        for number, batch in enumerate(batches[done:], start=done):
            set_seed(digest(seed, "answer", number) % 2**32)
            repeated = [task for task in batch for _ in range(samples)]
            rollouts = ours.respond([ours.rollouts.prompt(task) for task in repeated])
            lines = [
                # The task's own id, although a task with the same prompt and reference counts as another in training.
                {
                    **ours.rollouts.line(rollout, rollout.turn.verdict.score if rollout.turn.verdict else 0.0),
                    "id": task.id,
                }
                for task, rollout in zip(repeated, rollouts, strict=True)
            ]
            with record.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            advance(len(batch))
    ours.rollouts.metrics()  # discard them, so that the next step does not report them


def preference(
    algorithm: Preference,
    model: str,
    settings: Mapping[str, Any],
    tokenizer: Any,
    prompts: Prompts | None,
    pairs: Mapping[str, Any],
    rpo: Mapping[str, Any] | None = None,
    *,
    adapters: Any = None,
) -> DPOTrainer:
    """Create a DPO or RPO trainer on pairs written by `nemo-ext preference_data`.

    Args:
        prompts: the model's chat template; None if it has none and the pairs are already rendered.
        pairs: mapping from splits (train, validation) to paths.
        rpo: eta, distance and weight of RPO's loss; None for DPO.
        adapters: peft's config of low-rank adapters; None to train all weights.

    Raises:
        ValueError: a file is missing, invalid or without true rewards, or TRL does not have a setting.
    """
    files = {split: Path(path).expanduser() for split, path in pairs.items() if path}
    for split, path in files.items():
        if not path.is_file():
            raise ValueError(f"pairs.{split}={path}: no such file; write it with `nemo-ext preference_data`")
    limit = settings.get("max_length")
    loaded = {
        split: _pairs(
            path, f"pairs.{split}", prompts, tokenizer, limit, algorithm.lengths.prompt, with_rewards=rpo is not None
        )
        for split, path in files.items()
    }
    return (partial(_Rpo, **rpo) if rpo else _Dpo)(
        model=model,
        args=make_config(algorithm, settings),
        train_dataset=loaded["train"],
        eval_dataset=loaded.get("validation"),
        processing_class=tokenizer,
        peft_config=adapters,
    )


def _pairs(
    path: Path,
    where: str,
    prompts: Prompts | None,
    tokenizer: Any,
    limit: int | None,
    max_prompt: int | None,
    *,
    with_rewards: bool,
) -> Dataset:
    """Return a file's tokenized pairs of at most `limit` tokens, since TRL truncates longer ones and trains on them."""
    try:
        pairs = read_pairs(path, prompts, with_rewards=with_rewards)
        pairs = with_short_prompts(pairs, tokenizer, max_prompt)
    except ValueError as error:
        raise ValueError(f"{where} cannot be read ({error})") from error
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        row: dict[str, Any] = dict(zip(_IDS, token_ids(pair, tokenizer), strict=True))
        rows.append(row | dict(zip(_SCORES, pair.rewards or (), strict=bool(pair.rewards))))
    ends = tuple(map(tokenizer.decode, sorted(end_tokens(tokenizer, None if prompts is None else prompts.template))))
    if unended := [pair for pair in pairs if not pair.chosen.endswith(ends)]:
        notice(
            f"{where}: {len(unended):,} of {len(pairs):,} chosen responses do not end with {' or '.join(ends)}, so the "
            f"model does not learn to end them (first: {unended[0].chosen[-20:]!r})"
        )
    prompt, *sides = _IDS
    short = [row for row in rows if limit is None or all(len(row[prompt]) + len(row[side]) <= limit for side in sides)]
    if not short:
        raise ValueError(
            f"{where}={path}: all {len(rows):,} pairs have more than rl.lengths.total={limit} tokens; raise "
            "rl.lengths.total"
        )
    if len(short) < len(rows):
        notice(f"{path}: excluded {len(rows) - len(short):,} pairs with more than rl.lengths.total={limit} tokens")
    return Dataset.from_list(short)


_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
"""Names of the columns that TRL's collator reads."""


class Log(TrainerCallback):
    """Callback that writes every log, with the environments' metrics, to a file and prints one line per step."""

    def __init__(self, path: Path, rollouts: Rollouts | None) -> None:
        self._path, self._rollouts = path, rollouts

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **rest: Any) -> None:
        """Write and print a log; called by the trainer."""
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if self._rollouts is not None:
            evaluating = any(name.startswith("eval_") for name in values)
            metrics = _of_all_processes(self._rollouts.metrics())
            values |= {("eval_" if evaluating else "") + name: value for name, value in metrics.items()}
        if not state.is_world_process_zero:
            return
        with self._path.open("ab") as file:
            file.write(json_line({"step": state.global_step} | {name: float(x) for name, x in values.items()}))
        shown = [f"{name} {values[key]:.3f}" for key, name in _SHOWN.items() if values.get(key) is not None]
        if shown:
            notice(f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}")


def _of_all_processes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the environments' metrics over the episodes of all processes; see `Rollouts.metrics`."""
    parts = gather_object([metrics])
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            episodes = part[f"{name.partition('/')[0]}/episodes"]
            totals[name] = totals.get(name, 0.0) + (value if name.endswith("/episodes") else value * episodes)
    return {
        name: total if name.endswith("/episodes") else total / totals[f"{name.partition('/')[0]}/episodes"]
        for name, total in totals.items()
    }


_SHOWN = {
    "reward": "reward",
    "eval_reward": "validation reward",
    "loss": "loss",
    "completions/mean_length": "tokens",
    "rewards/accuracies": "accuracy",
    "eval_rewards/accuracies": "validation accuracy",
}


def _dataset(rollouts: Rollouts, tasks: PlannedTasks, size: int) -> Dataset:
    return Dataset.from_dict({"prompt": [rollouts.prompt(tasks[number]) for number in range(size)]})


def _draw(trainer: Any, tasks: PlannedTasks, saved: Mapping[str, Any] | None) -> None:
    """Make the trainer draw its tasks through a `Drawn` callback."""
    for file in tasks.files:
        for task in file.tasks:
            trainer.rollouts.prompt(task)
    trainer.drawn = Drawn(tasks, saved, trainer.accelerator.process_index, trainer.accelerator.num_processes)
    trainer.add_callback(trainer.drawn)


class Due(TrainerCallback):
    """Callback that ends training with a checkpoint when pass rates must be measured.

    A training step has `updates` optimizer updates.
    """

    def __init__(self, curricula: Curricula, updates: int) -> None:
        self.now = False
        self._curricula, self._updates = curricula, updates

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Check whether pass rates must be measured: after each update, and before a validation's checkpoint."""
        step, within = divmod(state.global_step, self._updates)
        if not within and self._curricula.due(step, validations(state.log_history, self._updates)):
            self.now = control.should_save = control.should_training_stop = True

    on_evaluate = on_step_end


def validations(logs: Sequence[Mapping[str, Any]], updates: int) -> list[tuple[int, float]]:
    """Return (step, reward) of each validation in a trainer's logs; a step has `updates` updates."""
    return [(log["step"] // updates, log["eval_reward"]) for log in logs if log.get("eval_reward") is not None]


class Stop(TrainerCallback):
    """Callback that ends training with a checkpoint after the step in which a signal arrives in any process.

    A second signal ends training immediately.
    """

    def __init__(self, updates: int) -> None:
        self.asked = False
        self._updates, self._since = updates, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End training after a whole step if a signal has arrived; called by the trainer after each update."""
        if state.global_step % self._updates == 0 and any(gather_object([self.asked])):
            self.asked = True
            control.should_save = control.should_training_stop = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM inside the context."""

        def ask(number: int, frame: object) -> None:
            if self.asked and time.monotonic() - self._since > SECONDS_OF_ONE:
                raise KeyboardInterrupt
            if self.asked:
                return
            self.asked, self._since = True, time.monotonic()
            notice("stopping and saving after this step; a second signal ends the run at once")

        with signals_to(ask):
            yield


class _Reward:
    """TRL reward function that returns the verifiers' rewards, or group rewards if the algorithm has them."""

    __name__ = "verified"

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.trainer: Any = None

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        rollout: list[Rollout] | None = None,
        earned: list[float] | None = None,
        **rest: Any,
    ) -> list[float]:
        rollouts = rollout or self.rollouts.verified(prompts, completion_ids)
        if not self.trainer.model.training:
            rewards = [each.turn.reward.total if each.turn.reward else 0.0 for each in rollouts]
            tasks = [each.episode.task.id for each in rollouts]
            self.rollouts.validated += zip(tasks, rewards, strict=True)
            return rewards
        self.trainer.scored = prompts
        rewards = self.trainer.training_rewards(rollouts) if earned is None else earned
        everything = gather_object(list(zip(rollouts, rewards, strict=True)))
        if self.trainer.accelerator.is_main_process:
            self.trainer.record(*zip(*everything, strict=True))
        return rewards


def _conversations(prompts: list[str], trainer: Any) -> dict[str, list[Any] | None]:
    """Generate all turns of all conversations in a batch; this is TRL's `rollout_func`."""

    def generate(ids: list[list[int]], room: int) -> tuple[list[list[int]], list[list[float]] | None]:
        limit = trainer.generation_config.max_new_tokens
        trainer.generation_config.max_new_tokens = min(limit, room)
        try:
            responses, logprobs = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
        finally:
            trainer.generation_config.max_new_tokens = limit
        return list(responses), logprobs

    with torch.no_grad():
        rollouts = trainer.rollouts.conversations(prompts, generate)
    logprobs = [rollout.logprobs for rollout in rollouts]
    return {
        "prompt_ids": [rollout.prompt for rollout in rollouts],
        "completion_ids": [rollout.tokens for rollout in rollouts],
        "env_mask": [rollout.mask for rollout in rollouts],
        "logprobs": logprobs if any(logprobs) else None,
        "rollout": rollouts,
    }
