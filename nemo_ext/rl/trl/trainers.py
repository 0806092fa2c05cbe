"""TRL's trainers with our prompts, rewards and records."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from transformers import TrainerCallback
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from nemo_ext.job.progress import notice
from nemo_ext.memory.sampler import Phases
from nemo_ext.rl.algorithms import PolicyGradient, Preference
from nemo_ext.rl.plan import PlannedTasks
from nemo_ext.rl.rpo import Distance, rpo_loss
from nemo_ext.rl.trl.render import make_config
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


class _OurPrompts(_Phased):
    """Trainer mixin for prompts that the chat template has already rendered, with special tokens."""

    rollouts: Rollouts
    model: Any

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return self.rollouts.encoded(prompts), None, {}

    def _generate_and_score_completions(self, *arguments: Any, **named: Any) -> Any:
        with self.phases.during("generation" if self.model.training else "validation"):
            return super()._generate_and_score_completions(*arguments, **named)  # type: ignore[misc]

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        made = super()._generate(*arguments, **named)  # type: ignore[misc]
        if self.model.training:
            self.phases.begin("scoring")  # by verifiers, and by the reference model
        return made


class _Grpo(_OurPrompts, GRPOTrainer):
    pass


class _Rloo(_OurPrompts, RLOOTrainer):
    pass


class _Dpo(_Phased, DPOTrainer):
    pass


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
) -> GRPOTrainer | RLOOTrainer:
    """Make a GRPO or RLOO trainer on tasks.

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
    trainer = trainers[algorithm.algorithm](
        model=model,
        args=make_config(algorithm, {**own, **settings}),
        train_dataset=_dataset(rollouts, train),
        eval_dataset=None if validation is None else _dataset(rollouts, validation),
        reward_funcs=[reward],
        processing_class=tokenizer,
        **arguments,
    )
    trainer.rollouts, reward.trainer = rollouts, trainer
    if same := sorted(rollouts.same):
        notice(f"{len(same):,} tasks have the prompt and reference of another and count as that one: {same[0]} ...")
    return trainer


def preference(
    algorithm: Preference,
    model: str,
    settings: Mapping[str, Any],
    tokenizer: Any,
    pairs: Mapping[str, Any],
    rpo: Mapping[str, Any] | None = None,
) -> DPOTrainer:
    """Make a DPO or RPO trainer on pairs that `nemo-ext preference_data` writes for TRL.

    Args:
        rpo: eta, distance and weight of RPO's loss; None for DPO.

    Raises:
        ValueError: a file that is not there or has no true rewards, or a setting that TRL does not know.
    """
    files = {split: Path(path) for split, path in pairs.items() if path}
    for split, path in files.items():
        if not path.is_file():
            raise ValueError(f"pairs.{split}={path}: no such file; `nemo-ext preference_data` writes it")
    most = settings.get("max_length")
    loaded = {split: _pairs(path, f"pairs.{split}", tokenizer, most) for split, path in files.items()}
    for split, found in loaded.items() if rpo else ():
        if any(name not in found.column_names or None in found[name] for name in _SCORES):
            raise ValueError(
                f"pairs.{split}={files[split]}: RPO needs chosen_score and rejected_score of every pair: "
                "`nemo-ext preference_data` writes them where answers have a score"
            )
    return (partial(_Rpo, **rpo) if rpo else _Dpo)(
        model=model,
        args=make_config(algorithm, settings),
        train_dataset=loaded["train"],
        eval_dataset=loaded.get("validation"),
        processing_class=tokenizer,
    )


def _pairs(path: Path, where: str, tokenizer: Any, most: int | None) -> Dataset:
    """Pairs of a file without those longer than `most` tokens, which TRL would cut and train on."""
    try:
        pairs = (Dataset.from_parquet if path.suffix == ".parquet" else Dataset.from_json)(str(path))
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        problem = str(error.__cause__ or error).splitlines() or ["it is empty"]
        raise ValueError(f"{where}={path}: not a file of pairs: {problem[0]}") from error
    if missing := {"prompt", "chosen", "rejected"} - set(pairs.column_names):
        raise ValueError(
            f"{where}={path}: no {', '.join(sorted(missing))}; trl_*.jsonl of `nemo-ext preference_data` has them"
        )
    if most is None:
        return pairs

    def fits(pair: Mapping[str, Any]) -> bool:
        return all(_tokens(pair["prompt"], pair[side], tokenizer) <= most for side in ("chosen", "rejected"))

    kept = pairs.filter(fits)
    if not len(kept):
        raise ValueError(f"{where}={path}: all {len(pairs):,} pairs have more than rl.lengths.total={most} tokens")
    if len(kept) < len(pairs):
        notice(f"{len(pairs) - len(kept):,} pairs of {path} are left out, longer than rl.lengths.total={most} tokens")
    return kept


def _tokens(prompt: Any, answer: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
    return len(tokenizer.apply_chat_template([*prompt, *answer], tokenize=True, return_dict=False))


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


def _dataset(rollouts: Rollouts, tasks: PlannedTasks) -> Dataset:
    return Dataset.from_dict({"prompt": [rollouts.prompt(tasks[number]) for number in range(len(tasks))]})


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
        **rest: Any,
    ) -> list[float]:
        made = rollout or self.rollouts.verified(prompts, completion_ids)
        if not self.trainer.model.training:
            return [one.turn.reward.total if one.turn.reward else 0.0 for one in made]
        given = self.rollouts.rewards(made)
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
