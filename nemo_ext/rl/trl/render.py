"""Translation of an algorithm into arguments for TRL's GRPOConfig, RLOOConfig or DPOConfig.

The adapter handles rewards, environment shares and prompt order. TRL is only imported to create a config.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from nemo_ext.job.settings import check_keys
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient, Preference
from nemo_ext.rl.rendering import Rendered


def render(
    algorithm: Algorithm, *, micro_batch: int = 1, processes: int = 1, by_adapter: Collection[str] = ()
) -> Rendered:
    """Translate the algorithm into arguments for `config_class`, for processes that generate with transformers.

    Args:
        processes: number of data-parallel processes, which share the batch.
        by_adapter: algorithm keys that TRL cannot express but the caller handles, such as `lengths.prompt`.

    Raises:
        ValueError: the batch size is not a multiple of the microbatches of all processes.
    """
    at_a_time = micro_batch * processes
    if algorithm.batch % at_a_time:
        raise ValueError(f"rl.batch={algorithm.batch} must be a multiple of micro_batch x processes = {at_a_time}")
    draft = Rendered(by_adapter=by_adapter)
    draft.surround(algorithm)
    draft.settings |= {
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": algorithm.batch // at_a_time,
    }
    if isinstance(algorithm, PolicyGradient):
        # TRL validates whole groups. Without log-probabilities the batch can be as large as in generation for training.
        group = algorithm.generations_per_prompt
        scored = algorithm.algorithm == "rloo" or algorithm.loss.kl.coefficient
        at_once = micro_batch if scored else algorithm.responses_per_step // processes
        draft.settings["per_device_eval_batch_size"] = math.ceil(at_once / group) * group
        _generation(draft, algorithm)
        if algorithm.algorithm == "rloo":
            _rloo(draft, algorithm)
        else:
            _grpo(draft, algorithm)
    else:
        _preference(draft, algorithm, micro_batch=micro_batch)
    _optimizer(draft, algorithm)
    if algorithm.router.frozen:
        draft.cannot("router.frozen", "TRL trains all weights unless the adapter freezes the router in the model")
    if algorithm.router.bias_update_rate:
        draft.cannot("router.bias_update_rate", "transformers does not update the experts' bias; it stays constant")
    if algorithm.router.replay:
        draft.cannot("router.replay", "transformers cannot replay routing; routers select experts again in training")
    return draft


def config_class(algorithm: Algorithm) -> type[Any]:
    """Return TRL's config class for the algorithm."""
    import trl

    names = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "dpo": "DPOConfig", "rpo": "DPOConfig"}
    found: type[Any] = getattr(trl, names[algorithm.algorithm])
    return found


def make_config(algorithm: Algorithm, settings: Mapping[str, Any], **others: Any) -> Any:
    """Create TRL's config, in which `others` take precedence; raise ValueError for unknown or invalid arguments."""
    arguments = {**settings, **others}
    check_arguments(algorithm, arguments)
    return config_class(algorithm)(**arguments)


def check_arguments(algorithm: Algorithm, names: Mapping[str, Any]) -> None:
    """Raise ValueError, with the nearest name, if a key of `names` is not an argument of the installed TRL's config."""
    known = [field.name for field in dataclasses.fields(config_class(algorithm)) if field.init]
    check_keys(names, known, required=(), where="trl")


def scaled(algorithm: PolicyGradient) -> str:
    """Return the value of TRL's `scale_rewards` that is closest to the algorithm's advantage."""
    return "none" if algorithm.advantage is None or algorithm.advantage.normalise == "none" else "group"


def _generation(draft: Rendered, algorithm: PolicyGradient) -> None:
    draft.settings |= {
        "num_generations": algorithm.generations_per_prompt,
        "generation_batch_size": algorithm.responses_per_step,
        "num_iterations": algorithm.passes,
        "temperature": algorithm.sampling.temperature,
        "top_p": algorithm.sampling.top_p,
        "max_completion_length": algorithm.lengths.response,
        "mask_truncated_completions": algorithm.overlong_filtering,
        "beta": algorithm.loss.kl.coefficient,
        # The adapter orders the prompts by curricula and shares of environments.
        "shuffle_dataset": False,
    }
    if algorithm.lengths.prompt is not None:
        draft.cannot("lengths.prompt", "TRL trains on longer prompts as well; exclude them from the tasks")
    elif algorithm.lengths.total is not None:
        draft.cannot("lengths.total", "only vLLM limits the total length; here only lengths.response is limited")
    if algorithm.turns > 1 and algorithm.algorithm != "grpo":
        draft.cannot("turns", "RLOOTrainer has no tools; turns=1 is used")
    if algorithm.asynchronous is not None:
        draft.cannot("asynchronous", "TRL alternates generation and training; responses have age 0")
    draft.adapter["max_batches"] = algorithm.sampling.max_batches if algorithm.algorithm == "grpo" else None
    if algorithm.sampling.drop_zero_variance and algorithm.algorithm != "grpo":
        reason = "groups are kept with an advantage of 0, and no others are generated"
        draft.cannot("sampling.drop_zero_variance", reason)


def _grpo(draft: Rendered, algorithm: PolicyGradient) -> None:
    advantage, loss = algorithm.advantage, algorithm.loss
    # The adapter replaces TRL's advantages, which support neither leave-one-out, the standard deviation over n, nor
    # teachers.
    if advantage is not None:
        draft.adapter["advantage"] = {"baseline": advantage.baseline, "normalise": advantage.normalise}
    if algorithm.distillation is not None:
        draft.adapter["distillation"] = dataclasses.asdict(algorithm.distillation)
    if algorithm.generations_per_prompt < 2:
        raise ValueError(
            "rl.generations_per_prompt=1: TRL requires at least 2 responses per prompt; set it to 2, and halve "
            "rl.prompts_per_step"
        )
    draft.settings |= {
        "scale_rewards": scaled(algorithm),
        # The adapter scales advantages for `group`.
        "loss_type": {"token": "dapo", "group": "dapo", "sequence": "grpo", "sequence_sum": "luspo"}[loss.level],
        "importance_sampling_level": loss.ratio,
        "delta": loss.dual_clip,
        # Only the gradient of the estimator, as in the papers and in NeMo-RL 0.5.
        "use_bias_correction_kl": False,
    }
    if loss.clip_low is not None:
        draft.settings |= {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high}
    elif algorithm.logits is None:
        _unclipped(draft, algorithm)
    if loss.kl.coefficient and loss.kl.estimator != "k3":
        draft.cannot("loss.kl.estimator", "TRL has only k3, which is used")
    correction = loss.importance_correction
    draft.settings["vllm_importance_sampling_correction"] = correction.kind != "none"
    if correction.kind != "none":
        mode = "mask" if correction.kind == "masked" else "truncate"
        draft.settings |= {
            "vllm_importance_sampling_mode": f"{correction.level}_{mode}",
            "vllm_importance_sampling_clip_max": correction.cap,
            # TRL requires a bound; 0 has no effect on ratios.
            "vllm_importance_sampling_clip_min": correction.floor or (0.0 if correction.cap is None else None),
        }


def _rloo(draft: Rendered, algorithm: PolicyGradient) -> None:
    advantage, loss = algorithm.advantage, algorithm.loss
    assert advantage is not None  # distillation requires algorithm=grpo
    if advantage.baseline != "leave_one_out":
        draft.cannot("advantage.baseline", "RLOOTrainer has only leave_one_out, which is used")
    if advantage.normalise != "none":
        draft.cannot("advantage.normalise", "RLOOTrainer normalises over the whole batch or not at all; none is used")
    draft.settings["normalize_advantages"] = False
    if loss.level != "sequence_sum":
        draft.cannot("loss.level", "RLOOTrainer has only sequence_sum, which is used")
    if loss.clip_low is None:
        _unclipped(draft, algorithm)
    else:
        draft.settings |= {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high}
        draft.cannot("loss.ratio", "RLOOTrainer clips one ratio per response, the product of its tokens' ratios")
    if loss.dual_clip is not None:
        draft.cannot("loss.dual_clip", "RLOOTrainer has no dual clip; it is omitted")
    if loss.kl.coefficient:
        draft.cannot("loss.kl.estimator", "RLOOTrainer subtracts k1 from the reward")
    if loss.importance_correction.kind != "none":
        draft.cannot("loss.importance_correction", "RLOOTrainer has no importance correction; it is omitted")
    if loss.mismatch is not None:
        draft.cannot("loss.mismatch", "RLOOTrainer has no such limit; all responses are trained on")
    if advantage.clip is not None:
        draft.cannot("advantage.clip", "RLOOTrainer's advantages are not clipped")
    if algorithm.penalties.any:
        draft.cannot("penalties", "RLOOTrainer has one advantage per response; malformed responses keep theirs")


def _unclipped(draft: Rendered, algorithm: PolicyGradient) -> None:
    # With one update per step the ratio is 1: it is never clipped, and the gradient equals REINFORCE's.
    if algorithm.updates_per_step > 1:
        draft.cannot("loss.clip_low", "TRL always uses ratios; they are clipped with epsilon=0.2, its default")


def _preference(draft: Rendered, algorithm: Preference, *, micro_batch: int) -> None:
    loss = algorithm.loss
    is_rpo = algorithm.algorithm == "rpo"
    # Our trainer adds RPO's loss, from the reference log-probabilities in the batch.
    normalised = loss.length_normalised and not is_rpo
    kinds: dict[str, float] = {"sigmoid_norm" if normalised else "sigmoid": 0.0 if is_rpo else loss.weight}
    if loss.sft_weight:
        kinds["sft"] = loss.sft_weight
        if not loss.sft_length_normalised:
            draft.cannot("loss.sft_length_normalised", "TRL uses the mean over tokens")
        elif micro_batch > 1:
            draft.cannot(
                "loss.sft_length_normalised", "TRL uses the mean over a microbatch's tokens; micro_batch=1 is exact"
            )
    draft.settings |= {
        "beta": loss.beta,
        "loss_type": list(kinds),
        "loss_weights": list(kinds.values()),
        "max_length": algorithm.lengths.total,
    }
    if is_rpo:
        draft.settings["precompute_ref_log_probs"] = True
        draft.adapter["rpo"] = {"eta": loss.eta, "distance": loss.distance, "weight": loss.weight}
        if loss.length_normalised:
            draft.cannot("loss.length_normalised", "RPO's margins are sums over tokens; sums are used")


def _optimizer(draft: Rendered, algorithm: Algorithm) -> None:
    optimizer, schedule, validation = algorithm.optimizer, algorithm.schedule, algorithm.validation
    # TRL counts updates; the algorithm counts generation steps.
    updates = algorithm.updates_per_step
    draft.settings |= {
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_gradient,
        "lr_scheduler_type": _schedule(algorithm),
        "warmup_steps": algorithm.warmup * updates,
    }
    if schedule.kind == "cosine" and schedule.final_share:
        draft.settings["lr_scheduler_kwargs"] = {"min_lr_rate": schedule.final_share}
    if schedule.kind == "linear" and schedule.final_share:
        draft.cannot("schedule.final_share", "TRL's linear schedule decays to 0")
    if algorithm.steps is not None:
        draft.settings["max_steps"] = algorithm.steps * updates
    elif schedule.epochs is not None:
        draft.settings["num_train_epochs"] = float(schedule.epochs)
    if validation.every is not None:
        # The adapter sets eval_strategy, since only it knows whether there are validation data.
        draft.settings |= {"eval_steps": validation.every * updates, "save_steps": validation.every * updates}
    draft.settings["eval_on_start"] = False
    draft.adapter["validation"] = {"every": validation.every, "at_start": validation.at_start}
    if validation.kl and (not isinstance(algorithm, PolicyGradient) or algorithm.algorithm == "rloo"):
        draft.cannot("validation.kl", "only supported for algorithm=grpo; it is omitted")
    if validation.keep_best is not None:
        draft.settings["save_total_limit"] = validation.keep_best
        draft.cannot("validation.keep_best", "the latest checkpoints are kept instead of the best")


def _schedule(algorithm: Algorithm) -> str:
    schedule = algorithm.schedule
    if schedule.kind == "constant":
        return "constant_with_warmup" if algorithm.warmup else "constant"
    return "cosine_with_min_lr" if schedule.kind == "cosine" and schedule.final_share else schedule.kind
