"""TRL's trainers with our prompts, rewards and records."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import DynamicCache, TrainerCallback, set_seed
from transformers.masking_utils import create_causal_mask
from transformers.trainer_callback import ExportableState
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from nemo_ext.chat.template import end_tokens
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.seeds import digest
from nemo_ext.memory.sampler import Phases
from nemo_ext.rl.adaptive import signals_of
from nemo_ext.rl.algorithms import Advantage, PolicyGradient, Preference
from nemo_ext.rl.pairs import read_pairs, token_ids
from nemo_ext.rl.plan import PlannedTasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.reprofile import Curricula
from nemo_ext.rl.rewards.advantages import group_advantages, zero_variance
from nemo_ext.rl.rpo import Distance, rpo_loss
from nemo_ext.rl.task import Task
from nemo_ext.rl.trl.render import make_config, scaled
from nemo_ext.rl.trl.rollouts import Rollout, Rollouts


class _Phased:
    """Trainer mixin that records phases which transformers' callbacks report only at their end."""

    phases = Phases(None)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        with self.phases.during("validation"):
            return super().evaluate(*arguments, **named)  # type: ignore[misc]

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        with self.phases.during("checkpoint"):
            super()._save_checkpoint(*arguments, **named)  # type: ignore[misc]


class Drawn(TrainerCallback, ExportableState):
    """Tasks that the trainer draws itself, where they do not follow from the step.

    Every checkpoint holds how far it came, so that a resumed run draws the next ones.

    Args:
        tasks: tasks of the run.
        kept: what the checkpoint that is resumed holds of it; None at the start.
    """

    def __init__(self, tasks: PlannedTasks, kept: Mapping[str, Any] | None = None) -> None:
        self.number = int(kept["number"]) if kept else 0
        self.shares = tasks.adaptive()
        if kept and self.shares is not None:
            self.shares.restore(kept["shares"])
        self._tasks = tasks
        self._datasets: list[int] = []

    def next(self, count: int) -> list[Task]:
        """The next tasks: in the plan's order, or from the datasets that adaptive shares choose."""
        first = self.number
        self.number += count
        if self.shares is None:
            return [self._tasks[first + number] for number in range(count)]
        places = self.shares.draw(count)
        self._datasets += [dataset for dataset, _ in places]
        return [self._tasks.nth(*place) for place in places]

    def learn(self, rewards: Sequence[float], generations: int) -> None:
        """Rewards of the next groups in the order in which they were drawn, each group's adjacent."""
        if self.shares is None:
            return
        groups = np.reshape(rewards, (-1, generations))
        own, self._datasets = self._datasets[: len(groups)], self._datasets[len(groups) :]
        self.shares.learn(own, signals_of(groups))

    def state(self) -> dict[str, Any]:
        """Called by the trainer when it saves."""
        kept = {"number": self.number, "shares": None if self.shares is None else self.shares.state()}
        return {"args": kept, "attributes": {}}


class _OurPrompts(_Phased):
    """Trainer mixin for prompts that the chat template has already rendered, with special tokens.

    Attributes:
        drawn: tasks that take the place of the dataset's; None leaves those.
    """

    rollouts: Rollouts
    model: Any
    num_generations: int
    _metrics: dict[str, Any]
    drawn: Drawn | None = None

    def log(self, *arguments: Any, **named: Any) -> None:
        # TRL's mean is of batches, of which the last may be shorter.
        sizes, means = self.rollouts.validated, self._metrics["eval"].get("reward", ())
        if sizes and len(sizes) == len(means):
            self._metrics["eval"]["reward"] = [float(np.average(means, weights=sizes))]
        sizes.clear()
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
            made = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            values |= {f"signal/{name}": signal for name, signal in shares.signals.items()} if shares else {}
            for name, value in values.items():
                self._metrics["train"][f"adaptive/{name}"].append(value)
            return made

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        made = super()._generate(*arguments, **named)  # type: ignore[misc]
        if self.model.training:
            self.phases.begin("scoring")  # by verifiers, and by the reference model
        return made

    def answered(self, prompts: list[str]) -> list[Rollout]:
        """Verified responses to prompts."""
        _, responses, *others = self._generate(prompts)
        extra = others[3] if len(others) > 3 else {}  # RLOO's trainer has no conversations
        return extra.get("rollout") or self.rollouts.verified(prompts, responses)

    def earned(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Rewards of generated groups to train on."""
        rewards = self.rollouts.rewards(rollouts)
        if self.drawn is not None:
            self.drawn.learn(rewards, self.num_generations)
        return rewards

    def _next_prompts(self, count: int) -> list[str]:
        """The next tasks' prompts, each as often as it has responses."""
        assert self.drawn is not None
        texts = map(self.rollouts.prompt, self.drawn.next(count))
        return [text for text in texts for _ in range(self.num_generations)]


class _Grpo(_OurPrompts, GRPOTrainer):
    """GRPO with the advantages of `group_advantages`, and groups without variance replaced.

    Attributes:
        advantage: how advantages are made; None leaves TRL's.
        rounds: maximum number of rounds of generation per step, the first one included, after which groups without
            variance stay; None keeps all groups.
        start: the model before training, to which validations measure the KL; None measures none.
    """

    advantage: Advantage | None = None
    rounds: int | None = None
    start: Any = None
    _earned: torch.Tensor

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training and not self.beta:
            # Of a validation only the rewards, and the KL to the start, count.
            if self.start is not None:
                self._metrics["eval"]["kl"].append(self._kl_to_start(model, inputs))
            return torch.zeros((), device=self.accelerator.device)
        # Means over the batch's tokens alone do not count rows, a KL or an entropy has a gradient in all of them, and a
        # quantile of entropies is of all.
        others = self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1
        counted = self.loss_type == "dapo" and not others
        made: torch.Tensor = super()._compute_loss(model, _trimmed(inputs, without_advantage=not counted))
        return made

    def _kl_to_start(self, model: Any, inputs: Mapping[str, Any]) -> float:
        """KL in nats per token of the answers, by the estimator k3, as TRL's."""
        total, tokens = 0.0, 0
        rows = self.args.per_device_train_batch_size
        for first in range(0, len(inputs["prompt_ids"]), rows):
            batch = {name: inputs[name][first : first + rows] for name in (*_TOKENS, "tool_mask") if name in inputs}
            batch = _trimmed(batch, without_advantage=True)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            width = batch["completion_ids"].shape[1]
            now, before = (
                self._get_per_token_logps_and_entropies(each, ids, mask, width)[0] for each in (model, self.start)
            )
            apart = (before - now).double()
            counted = batch["completion_mask"] * batch.get("tool_mask", 1)
            total += float(((apart.exp() - apart - 1) * counted).sum())
            tokens += int(counted.sum())
        return total / max(1, tokens)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self._earned = super()._calculate_rewards(*arguments, **named)
        return self._earned

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training and self.advantage is not None:
            # Of all processes, over whose border a group may lie.
            groups = self._earned.nansum(dim=1).view(-1, self.num_generations).double().cpu().numpy()
            found = group_advantages(groups, baseline=self.advantage.baseline, normalise=self.advantage.normalise)
            before = made["advantages"]
            first = self.accelerator.process_index * len(before)
            made["advantages"] = torch.as_tensor(found.reshape(-1)[first : first + len(before)]).to(before)
        return made

    def _generate(self, prompts: list[str]) -> Any:
        if not self.model.training or self.rounds is None:
            return super()._generate(prompts)
        assert self.drawn is not None
        wanted = len(prompts) // self.num_generations
        kept: list[dict[str, Any]] = []
        flat: list[dict[str, Any]] = []
        rounds = 0
        while len(kept) < wanted and rounds < self.rounds:
            if rounds:
                self.phases.begin("generation")
                prompts = self._next_prompts(wanted - len(kept))
            for group in self._groups(prompts):
                (flat if zero_variance(group["earned"]) else kept).append(group)
            rounds += 1
        dropped = flat[: len(kept) + len(flat) - wanted]
        for group in dropped:
            self.rollouts.note(group["rollout"], group["earned"], step=self.state.global_step + 1, dropped=True)
        values = {
            "dropped": len(dropped) / (len(kept) + len(flat)),
            "refill_rounds": rounds - 1,
            "left": (wanted - len(kept)) / wanted,
            "tasks_drawn": self.drawn.number,
        }
        for name, value in values.items():
            self._metrics["train"][f"zero_variance/{name}"].append(value)
        return _merged([*kept, *flat[len(dropped) :]])

    def _groups(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Generated and rewarded groups, by the names of their columns; a column that TRL leaves out is None."""
        given, responses, mask, texts, logprobs, extra, *_ = super()._generate(prompts)
        rollouts = extra.get("rollout") or self.rollouts.verified(prompts, responses)
        columns = {
            **dict(zip(_COLUMNS, (given, responses, mask, texts, logprobs), strict=True)),
            "rollout": rollouts,
            "earned": self.earned(rollouts),
        }
        return [
            {
                name: None if column is None else column[at : at + self.num_generations]
                for name, column in columns.items()
            }
            for at in range(0, len(prompts), self.num_generations)
        ]


def _trimmed(batch: Mapping[str, Any], *, without_advantage: bool) -> dict[str, Any]:
    """Micro-batch without the columns that are padding in every row, which change no loss.

    Args:
        batch: TRL's, with `[rows, prompt]` and `[rows, completion]`.
        without_advantage: keep the rows whose advantage is 0; else one stays where all are 0.
    """
    rows, width = batch["completion_mask"].shape
    kept = torch.arange(rows, device=batch["completion_mask"].device)
    if not without_advantage and batch["advantages"].dim() == 1:
        found = batch["advantages"].nonzero()[:, 0]
        kept = found if len(found) else kept[:1]
    begin = int(batch["prompt_mask"][kept].any(dim=0).int().argmax())
    end = max(1, width - int(batch["completion_mask"][kept].any(dim=0).flip(0).int().argmax()))
    made = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != rows:
            continue
        value = value[kept]
        if name in ("prompt_ids", "prompt_mask"):
            value = value[:, begin:]
        elif value.dim() == 2 and value.shape[1] == width:
            value = value[:, :end]
        made[name] = value
    return made


_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_COLUMNS = ("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs")
"""What TRL's `_generate` returns for each response, in its order."""


def _merged(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What TRL's `_generate` returns, of groups; rollouts and rewards go on to the reward function."""

    def column(name: str) -> list[Any] | None:
        parts = [group[name] for group in groups]
        return None if parts[0] is None else [value for part in parts for value in part]

    extra = {name: column(name) for name in ("rollout", "earned")}
    return (*map(column, _COLUMNS), extra, None, [])


class _Rloo(_OurPrompts, RLOOTrainer):
    pass


class _Dpo(_Phased, DPOTrainer):
    def _prepare_dataset(self, dataset: Dataset, *arguments: Any, **named: Any) -> Dataset:
        return dataset  # its tokens are there: the chat template's, as every engine reads them


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
    """RPO: DPO's own loss has weight 0 (`nemo_ext.rl.trl.render`), its SFT loss and metrics stay as they are.

    The reference's log-probabilities are in the batch (`precompute_ref_log_probs`).
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
        passes: list[Any] = []

        def kept(**arguments: Any) -> Any:
            passes.append(model(**arguments))
            return passes[-1]

        made = super()._compute_loss(kept, inputs, return_outputs)
        loss, *outputs = made if return_outputs else (made,)
        tokens = inputs["completion_mask"].shape[1] - 1
        chosen, rejected = passes[0].log_probs[:, -tokens:].sum(dim=1).chunk(2)
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
) -> GRPOTrainer | RLOOTrainer:
    """Make a GRPO or RLOO trainer on tasks.

    Args:
        algorithm: algorithm.
        model: Hugging Face folder.
        settings: arguments of TRL's config.
        tokenizer: Hugging Face tokenizer.
        rollouts: prompts and rewards.
        train: tasks of the run; with `sampling.drop_zero_variance` all that may be drawn.
        validation: tasks of validation.
        drawn: what the checkpoint which is resumed holds of `Drawn`; read with `sampling.drop_zero_variance` or
            adaptive shares alone, where the next tasks do not follow from the step.

    Raises:
        ValueError: a setting that TRL does not know, or RLOO with an environment of several turns.
    """
    trainers = {"grpo": _Grpo, "rloo": _Rloo}
    arguments: dict[str, Any] = {}
    if rollouts.has_conversations:
        if algorithm.algorithm == "rloo":
            raise ValueError("algorithm=rloo: TRL's trainer has no conversations with tools; algorithm=grpo has")
        arguments["rollout_func"] = _conversations
    own = {"remove_unused_columns": False, "shuffle_dataset": False, "ddp_find_unused_parameters": False}
    reward = _Reward(rollouts)
    trainer: Any = trainers[algorithm.algorithm](
        model=model,
        args=make_config(algorithm, {**own, **settings}),
        train_dataset=_dataset(rollouts, train, (algorithm.steps or 0) * algorithm.prompts_per_step),
        eval_dataset=None if validation is None else _dataset(rollouts, validation, len(validation)),
        reward_funcs=[reward],
        processing_class=tokenizer,
        **arguments,
    )
    trainer.rollouts, reward.trainer = rollouts, trainer
    _end_at(trainer, end_tokens(tokenizer, rollouts.prompts.template, trainer.model.generation_config))
    reads_places = "position_ids" in signature(type(trainer.model).forward).parameters
    if trainer.accelerator.num_processes == 1 and reads_places and not trainer.model._is_stateful:
        trainer.model.generate = partial(_generate, trainer.model)
    if algorithm.algorithm == "grpo":
        # trl.scale_rewards=... takes precedence.
        if trainer.args.scale_rewards == scaled(algorithm):
            trainer.advantage = algorithm.advantage
        trainer.rounds = algorithm.sampling.max_batches
        if algorithm.validation.kl and validation is not None and not trainer.beta:
            trainer.start = deepcopy(trainer.model).requires_grad_(False).eval()
    if getattr(trainer, "rounds", None) is not None or train.adaptive() is not None:
        _draw(trainer, train, drawn)
    if same := sorted(rollouts.same):
        notice(f"{len(same):,} tasks have the prompt and reference of another and count as that one: {same[0]} ...")
    made: GRPOTrainer | RLOOTrainer = trainer
    return made


def _end_at(trainer: Any, ends: frozenset[int]) -> None:
    """Let generation, masks, verification and the saved model end a response at the same ids."""
    ids = sorted(ends)
    trainer.rollouts.ends = ends
    trainer.eos_token_ids = trainer.model.generation_config.eos_token_id = ids
    if trainer.use_vllm:
        trainer.vllm_generation.generation_kwargs.setdefault("stop_token_ids", ids)
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ids


def _generate(model: Any, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> torch.Tensor:
    """As transformers' `generate`, but equal prompts that are adjacent are read once, `[rows, tokens]`."""
    generate = type(model).generate
    width = input_ids.shape[1]
    both, row = torch.unique_consecutive(torch.cat([input_ids, attention_mask], 1), dim=0, return_inverse=True)
    if len(both) < len(input_ids) and width > 1:
        prompts, masks = both[:, :width], both[:, width:-1]
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        places = (masks.cumsum(dim=-1) - 1).clamp(min=0)
        model(
            input_ids=prompts[:, :-1],
            attention_mask=masks,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            **{_CACHE: cache},
        )
        cache.batch_select_indices(row)
        others[_CACHE] = cache
    made: torch.Tensor = generate(model, input_ids=input_ids, attention_mask=attention_mask, **others)
    return made


_CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
"""Name of a cache to transformers' models, which changed."""


def answer(
    trainer: GRPOTrainer | RLOOTrainer, tasks: Sequence[Task], record: Path, *, samples: int, at_once: int, seed: int
) -> None:
    """Answer tasks with a trainer's model, as it generates and verifies in training.

    Answers of a batch follow from the seed and the batch's number alone, so those of a run that was killed are those of
    one that was not.

    Args:
        trainer: trainer made by `policy_gradient`, which trains nothing.
        tasks: tasks to answer.
        record: path of the JSONL file to append to; complete batches in it are not answered again.
        samples: number of answers to each task.
        at_once: number of tasks in a batch.
        seed: seed of the sampling.
    """
    ours: Any = trainer
    ours.model.eval()
    ours.num_generations = ours.num_generations_eval = samples
    record.parent.mkdir(parents=True, exist_ok=True)
    kept = record.read_text().splitlines(keepends=True) if record.exists() else []
    batches = list(batched(tasks, at_once))
    complete = sum(line.endswith("\n") for line in kept)
    done = len(batches) if complete == samples * len(tasks) else complete // (samples * at_once)
    write_text(record, "".join(kept[: samples * sum(map(len, batches[:done]))]))
    with progress_of("pass rates:", len(tasks), unit="tasks") as advance:
        advance(sum(map(len, batches[:done])))
        for number, batch in enumerate(batches[done:], start=done):
            set_seed(digest(seed, "answer", number) % 2**32)
            made = ours.answered([ours.rollouts.prompt(task) for task in batch for _ in range(samples)])
            of = [task for task in batch for _ in range(samples)]
            lines = [
                # The task's own id: one with the same prompt and reference counts as another elsewhere.
                {**ours.rollouts.line(one, one.turn.verdict.score if one.turn.verdict else 0.0), "id": task.id}
                for task, one in zip(of, made, strict=True)
            ]
            with record.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            advance(len(batch))
    ours.rollouts.metrics()  # of these answers, not of the next step


def preference(
    algorithm: Preference,
    model: str,
    settings: Mapping[str, Any],
    tokenizer: Any,
    prompts: Prompts | None,
    pairs: Mapping[str, Any],
    rpo: Mapping[str, Any] | None = None,
) -> DPOTrainer:
    """Make a DPO or RPO trainer on pairs that `nemo-ext preference_data` writes.

    Args:
        prompts: chat template of the model; None if it has none, and pairs are rendered.
        rpo: eta, distance and weight of RPO's loss; None for DPO.

    Raises:
        ValueError: a file that is not there or has no true rewards, or a setting that TRL does not know.
    """
    files = {split: Path(path).expanduser() for split, path in pairs.items() if path}
    for split, path in files.items():
        if not path.is_file():
            raise ValueError(f"pairs.{split}={path}: no such file; `nemo-ext preference_data` writes it")
    most = settings.get("max_length")
    loaded = {
        split: _pairs(path, f"pairs.{split}", prompts, tokenizer, most, with_rewards=rpo is not None)
        for split, path in files.items()
    }
    return (partial(_Rpo, **rpo) if rpo else _Dpo)(
        model=model,
        args=make_config(algorithm, settings),
        train_dataset=loaded["train"],
        eval_dataset=loaded.get("validation"),
        processing_class=tokenizer,
    )


def _pairs(
    path: Path, where: str, prompts: Prompts | None, tokenizer: Any, most: int | None, *, with_rewards: bool
) -> Dataset:
    """Tokens of the pairs of a file without those longer than `most`, which TRL would cut and train on."""
    try:
        pairs = read_pairs(path, prompts, with_rewards=with_rewards)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        row: dict[str, Any] = dict(zip(_IDS, token_ids(pair, tokenizer), strict=True))
        rows.append(row | dict(zip(_SCORES, pair.rewards or (), strict=bool(pair.rewards))))
    ends = tuple(map(tokenizer.decode, sorted(end_tokens(tokenizer, None if prompts is None else prompts.template))))
    if unended := [pair for pair in pairs if not pair.chosen.endswith(ends)]:
        said = f"the first of them ends with {unended[0].chosen[-20:]!r}: a model learns to end only where its token is"
        notice(f"{where}: {len(unended):,} of {len(pairs):,} chosen responses end without {' or '.join(ends)}; {said}")
    prompt, *sides = _IDS
    kept = [row for row in rows if most is None or all(len(row[prompt]) + len(row[side]) <= most for side in sides)]
    if not kept:
        raise ValueError(f"{where}={path}: all {len(rows):,} pairs have more than rl.lengths.total={most} tokens")
    if len(kept) < len(rows):
        notice(f"{len(rows) - len(kept):,} pairs of {path} are left out, longer than rl.lengths.total={most} tokens")
    return Dataset.from_list(kept)


_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
"""Columns that TRL's collator reads."""


class Log(TrainerCallback):
    """Writes every log of the trainer as a line with the environments' metrics, and prints one line per step."""

    def __init__(self, path: Path, rollouts: Rollouts | None) -> None:
        self._path, self._rollouts = path, rollouts

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **rest: Any) -> None:
        """Called by the trainer."""
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if self._rollouts is not None:
            evaluating = any(name.startswith("eval_") for name in values)
            values |= {
                ("eval_" if evaluating else "") + name: value for name, value in self._rollouts.metrics().items()
            }
        with self._path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **values}) + "\n")
        shown = [f"{name} {values[key]:.3f}" for key, name in _SHOWN.items() if values.get(key) is not None]
        if shown:
            notice(f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}")


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


def _draw(trainer: Any, tasks: PlannedTasks, kept: Mapping[str, Any] | None) -> None:
    """Let the trainer draw its tasks itself.

    Raises:
        ValueError: there are several processes, or two tasks cannot be told apart by their prompts.
    """
    if trainer.accelerator.num_processes > 1:
        raise ValueError(
            "rl.sampling.drop_zero_variance and tasks.train.adapt need one process with TRL: leave them out"
        )
    for file in tasks.files:
        for task in file.tasks:
            trainer.rollouts.prompt(task)
    trainer.drawn = Drawn(tasks, kept)
    trainer.add_callback(trainer.drawn)


class Due(TrainerCallback):
    """Ends training with a checkpoint where pass rates are to be measured again.

    Args:
        curricula: curricula of the run.
        updates: number of updates per step.
    """

    def __init__(self, curricula: Curricula, updates: int) -> None:
        self.now = False
        self._curricula, self._updates = curricula, updates

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer after each update."""
        self._look(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer after each validation, before it saves."""
        self._look(state, control)

    def _look(self, state: Any, control: Any) -> None:
        step, within = divmod(state.global_step, self._updates)
        if not within and self._curricula.due(step, validations(state.log_history, self._updates)):
            self.now = control.should_save = control.should_training_stop = True


def validations(logs: Sequence[Mapping[str, Any]], updates: int) -> list[tuple[int, float]]:
    """Step and reward of each validation in a trainer's logs."""
    return [(log["step"] // updates, log["eval_reward"]) for log in logs if log.get("eval_reward") is not None]


class Stop(TrainerCallback):
    """Ends training with a checkpoint at the next whole step once a signal came; the second one ends at once."""

    def __init__(self, updates: int) -> None:
        self.asked = False
        self._updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer after each update, of which a step has `updates`."""
        if self.asked and state.global_step % self._updates == 0:
            control.should_save = control.should_training_stop = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen for Ctrl-C and SIGTERM."""

        def ask(number: int, frame: object) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            notice("stopping: the step is finished and a checkpoint saved (again to end at once)")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Reward:
    """TRL reward function: the verifiers' rewards, rewritten over groups if the algorithm asks for it."""

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
        made = rollout or self.rollouts.verified(prompts, completion_ids)
        if not self.trainer.model.training:
            self.rollouts.validated.append(len(made))
            return [one.turn.reward.total if one.turn.reward else 0.0 for one in made]
        given = self.trainer.earned(made) if earned is None else earned
        self.rollouts.note(made, given, step=self.trainer.state.global_step + 1)
        return given


def _conversations(prompts: list[str], trainer: Any) -> dict[str, list[Any] | None]:
    """TRL's `rollout_func`: generate all turns of all conversations of a batch."""

    def generate(ids: list[list[int]], room: int) -> list[list[int]]:
        limit = trainer.generation_config.max_new_tokens
        trainer.generation_config.max_new_tokens = min(limit, room)
        try:
            made, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
        finally:
            trainer.generation_config.max_new_tokens = limit
        return list(made)

    with torch.no_grad():
        made = trainer.rollouts.conversations(prompts, generate)
    return {
        "prompt_ids": [one.prompt for one in made],
        "completion_ids": [one.tokens for one in made],
        "env_mask": [one.own for one in made],
        "logprobs": None,
        "rollout": made,
    }
