"""Translation of an algorithm into changes to the installed NeMo-RL's example config and settings of our adapter.

`Checkout.config` builds the complete master config from the changes, and `nemo_ext.rl.nemo_rl.run` trains with it. A
version's features are determined from its sources (`nemo_ext.rl.nemo_rl.checkout`), never from its number.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from nemo_ext.rl.algorithms import DEFAULT, Algorithm, PolicyGradient, Preference
from nemo_ext.rl.nemo_rl.checkout import Checkout, Section
from nemo_ext.rl.nemo_rl.draft import Draft, section_of
from nemo_ext.rl.nemo_rl.precision import render_precision
from nemo_ext.rl.precision import Precision

Backend = Literal["megatron", "dtensor"]
# Number of steps of a schedule that never ends, for torch's ConstantLR, which counts them.
_FOREVER = 10_000_000_000
ALL = 1_000_000


def render(
    algorithm: Algorithm, checkout: Checkout, *, backend: Backend = "megatron", precision: Precision | None = None
) -> Draft:
    """Render the algorithm as changes to `checkout.config(section_of(algorithm))`.

    Args:
        backend: training backend; NeMo-RL's configs have optimizer sections for both.
        precision: precision plan for generation and training; None for the default of NeMo-RL's configs.
    """
    draft = Draft(checkout, algorithm)
    draft.put("backend", "policy.megatron_cfg.enabled", backend == "megatron")
    draft.put("backend", "policy.dtensor_cfg.enabled", backend == "dtensor")
    if isinstance(algorithm, PolicyGradient):
        _policy_gradient(draft, algorithm, checkout)
    else:
        _preference(draft, algorithm)
    _optimizer(draft, algorithm, backend)
    _router(draft, algorithm, backend)
    if precision is not None:
        render_precision(precision, algorithm, backend=backend, draft=draft)
    return draft


def _policy_gradient(draft: Draft, algorithm: PolicyGradient, checkout: Checkout) -> None:
    loop = section_of(algorithm)
    draft.put("prompts_per_step", f"{loop}.num_prompts_per_step", algorithm.prompts_per_step)
    draft.put("generations_per_prompt", f"{loop}.num_generations_per_prompt", algorithm.generations_per_prompt)
    draft.put("batch", "policy.train_global_batch_size", algorithm.batch)
    if algorithm.passes > 1:
        draft.cannot("passes", "NeMo-RL trains on a step's responses once; passes=1 is used")
    draft.put("turns", f"{loop}.max_rollout_turns", algorithm.turns)
    draft.put("sampling.temperature", "policy.generation.temperature", algorithm.sampling.temperature)
    draft.put("sampling.top_p", "policy.generation.top_p", algorithm.sampling.top_p)
    lengths = algorithm.lengths
    if lengths.prompt is not None:
        draft.put("lengths.prompt", "data.max_input_seq_length", lengths.prompt)
    draft.put("lengths.response", "policy.generation.max_new_tokens", lengths.response)
    draft.put("lengths.total", "policy.max_total_sequence_length", lengths.context)
    _duration(draft, algorithm, loop)
    if algorithm.logits is None:
        _updates(draft, algorithm, checkout)
    else:
        _logits(draft, algorithm)


def _updates(draft: Draft, algorithm: PolicyGradient, checkout: Checkout) -> None:
    draft.put("overlong_filtering", "grpo.overlong_filtering", algorithm.overlong_filtering)
    if algorithm.overlong_filtering and algorithm.asynchronous and "overlong_filtering" not in checkout.asynchronous:
        draft.cannot(
            "overlong_filtering", "this version's asynchronous loop does not filter; overlong responses are trained on"
        )
    _advantage(draft, algorithm)
    if algorithm.penalties.any:
        if draft.has("grpo.invalid_tool_call_advantage"):
            draft.adapter["penalties"] = asdict(algorithm.penalties)
        else:
            draft.cannot("penalties", "this version has no penalties; malformed responses keep their advantages")
    _distillation(draft, algorithm, checkout)
    _policy_loss(draft, algorithm)
    _dropping(draft, algorithm, checkout.refills)
    if algorithm.asynchronous is not None:
        draft.put("asynchronous", "grpo.async_grpo.enabled", True)
        age = algorithm.asynchronous.max_age
        draft.put("asynchronous.max_age", "grpo.async_grpo.max_trajectory_age_steps", age)
        in_flight = ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")
        values = dict.fromkeys(in_flight, algorithm.asynchronous.in_flight)
        draft.put_all("asynchronous.in_flight", "grpo.async_grpo", values)
        # Required by async_grpo_train, which also requires separate GPUs for generation (`layout.put_layout`).
        draft.put("asynchronous", "policy.generation.vllm_cfg.async_engine", True)
    else:
        draft.put("asynchronous", "grpo.async_grpo.enabled", False)


def _advantage(draft: Draft, algorithm: PolicyGradient) -> None:
    # The adapter replaces NeMo-RL's baseline and deviation (`group_rewards`).
    advantage = algorithm.advantage
    if advantage is None:
        return
    draft.adapter["advantage"] = {"baseline": advantage.baseline, "normalise": advantage.normalise}
    values = {
        "normalize_rewards": advantage.normalise != "none",
        "use_leave_one_out_baseline": advantage.baseline == "leave_one_out",
    }
    draft.put_all("advantage", "grpo", values)
    estimator = "grpo.adv_estimator"
    draft.put_all("advantage", estimator, {key: values[key] for key in values if draft.has(f"{estimator}.{key}")})
    if draft.has("grpo.adv_estimator.name"):
        draft.put("advantage", "grpo.adv_estimator.name", "grpo")
    _clip(draft, "advantage.clip", advantage.clip)


def _clip(draft: Draft, ours: str, clip: float | None) -> None:
    if clip is not None:
        draft.put_all(ours, "grpo", {"advantage_clip_low": -clip, "advantage_clip_high": clip})


def _distillation(draft: Draft, algorithm: PolicyGradient, checkout: Checkout) -> None:
    distillation, section = algorithm.distillation, "on_policy_distillation"
    if distillation is None:
        return
    if not checkout.distils:
        raise ValueError(
            "rl.distillation: this version of NeMo-RL has no teachers for tasks outside NeMo Gym; use its main branch "
            "of 2026-08-22 or later, or engine=trl"
        )
    if algorithm.asynchronous is None:
        raise ValueError(
            "rl.distillation: NeMo-RL has teachers only in its asynchronous loop; set rl.asynchronous={max_age: 1}"
        )
    for name, place in distillation.places.items():
        if "://" in place:
            raise ValueError(
                f"rl.distillation.teachers.{name}={place} must be a Hugging Face folder, because NeMo-RL loads "
                "teachers itself"
            )
    has_default = DEFAULT in distillation.places
    values = {
        "enabled": True,
        "teacher_model_by_agent_name": distillation.places,
        "default_teacher_alias": DEFAULT if has_default else None,
        "strict_agent_name_match": not has_default,
    }
    draft.put("distillation", "grpo.adv_estimator.name", "opd")
    draft.put_all("distillation", section, values)
    draft.put("distillation", f"{section}.non_colocated_teachers.enabled", True)
    if algorithm.loss.on_policy and algorithm.loss.mismatch is None:
        raise ValueError(
            "rl.loss.on_policy=true leaves NeMo-RL without log-probabilities of the policy, which distillation needs; "
            "set rl.loss.mismatch too, or rl.loss={on_policy: false, clip_low: null, clip_high: null}, which has the "
            "same gradient"
        )
    _clip(draft, "distillation.clip", distillation.clip)
    draft.adapter["distillation"] = {"by": distillation.by, "teachers": distillation.places}


def _logits(draft: Draft, algorithm: PolicyGradient) -> None:
    distillation, logits = algorithm.distillation, algorithm.logits
    assert distillation is not None and logits is not None
    places = sorted(set(distillation.places.values()))
    if len(places) > 1 or "://" in places[0]:
        raise ValueError(
            f"rl.distillation.teachers={', '.join(places)}: NeMo-RL's distillation from logits supports only one "
            "teacher, a Hugging Face folder; name one, or use engine=trl"
        )
    if algorithm.overlong_filtering:
        draft.cannot("overlong_filtering", "NeMo-RL's distillation does not filter; overlong responses are trained on")
    if logits.top_k is None:
        draft.cannot("distillation.logits.top_k", "NeMo-RL compares the most likely tokens only; 64 of them are used")
    draft.put("distillation.logits.top_k", "distillation.topk_logits_k", logits.top_k or 64)
    kinds = {0.0: "reverse", 1.0: "forward"}
    draft.put("distillation.logits.forward_share", "loss_fn.kl_type", kinds.get(logits.forward_share, "mixed"))
    draft.put("distillation.logits.forward_share", "loss_fn.mixed_kl_weight", logits.forward_share)
    draft.adapter["distillation"] = asdict(distillation)


def _policy_loss(draft: Draft, algorithm: PolicyGradient) -> None:
    loss = algorithm.loss
    draft.put("loss.level", "loss_fn.token_level_loss", loss.level in ("token", "group"))
    if loss.level in ("sequence_sum", "group"):
        draft.adapter["loss"] = {"level": loss.level}
    draft.put("loss.ratio", "loss_fn.sequence_level_importance_ratios", loss.ratio == "sequence")
    draft.put("loss.clip_low", "loss_fn.disable_ppo_ratio", loss.clip_low is None)
    if loss.clip_low is not None:
        draft.put("loss.clip_low", "loss_fn.ratio_clip_min", loss.clip_low)
        draft.put("loss.clip_high", "loss_fn.ratio_clip_max", loss.clip_high)
    draft.put("loss.dual_clip", "loss_fn.ratio_clip_c", loss.dual_clip)
    draft.put("loss.kl.coefficient", "loss_fn.reference_policy_kl_penalty", loss.kl.coefficient)
    draft.put("loss.kl.estimator", "loss_fn.reference_policy_kl_type", loss.kl.estimator)
    _importance_correction(draft, algorithm)
    if loss.mismatch is not None:
        draft.put("loss.mismatch", "grpo.seq_logprob_error_threshold", loss.mismatch)
    if loss.on_policy:
        draft.put("loss.on_policy", "loss_fn.force_on_policy_ratio", True)


def _importance_correction(draft: Draft, algorithm: PolicyGradient) -> None:
    correction, ours = algorithm.loss.importance_correction, "loss.importance_correction"
    use = correction.kind != "none"
    if not use and algorithm.asynchronous is not None:
        draft.cannot(f"{ours}.kind", "asynchronous training requires a correction; kind=untruncated is used")
        use = True
    draft.put(ours, "loss_fn.use_importance_sampling_correction", use)
    draft.put(f"{ours}.cap", "loss_fn.truncated_importance_sampling_ratio", correction.cap)
    kind = {"truncated": "tis", "masked": "icepop"}.get(correction.kind)
    prefix = "loss_fn.truncated_importance_sampling"
    if draft.has(f"{prefix}_type"):
        draft.put(f"{ours}.kind", f"{prefix}_type", kind)
        draft.put(f"{ours}.floor", f"{prefix}_ratio_min", correction.floor)
    elif correction.kind == "masked":
        draft.cannot(f"{ours}.kind", "this version can truncate ratios but not mask them; kind=truncated is used")
        draft.cannot(f"{ours}.floor", "this version has no lower bound; floor=0 is used")
    elif correction.floor:
        draft.cannot(f"{ours}.floor", "this version has no lower bound; floor=0 is used")
    # NeMo-RL also uses the level of the policy's ratio here.
    if use and correction.level != algorithm.loss.ratio:
        draft.cannot(f"{ours}.level", f"NeMo-RL uses the level of loss.ratio; level={algorithm.loss.ratio} is used")


def _dropping(draft: Draft, algorithm: PolicyGradient, refills: bool) -> None:
    sampling = algorithm.sampling
    # In the asynchronous loop the adapter drops groups (`dropping`).
    drops = algorithm.asynchronous is None or refills
    if sampling.drop_zero_variance and not drops:
        draft.cannot(
            "sampling.drop_zero_variance",
            "this version's asynchronous loop cannot drop groups; they stay in the batch with an advantage of 0",
        )
    draft.put("sampling.drop_zero_variance", "grpo.use_dynamic_sampling", sampling.drop_zero_variance and drops)
    if sampling.max_batches is not None and drops:
        draft.put("sampling.max_batches", "grpo.dynamic_sampling_max_gen_batches", sampling.max_batches)


def _preference(draft: Draft, algorithm: Preference) -> None:
    loss = algorithm.loss
    draft.put("batch", "policy.train_global_batch_size", algorithm.batch)
    draft.put("loss.beta", "dpo.reference_policy_kl_penalty", loss.beta)
    draft.put("loss.length_normalised", "dpo.preference_average_log_probs", loss.length_normalised)
    draft.put("loss.sft_length_normalised", "dpo.sft_average_log_probs", loss.sft_length_normalised)
    draft.put("loss.weight", "dpo.preference_loss_weight", loss.weight)
    draft.put("loss.sft_weight", "dpo.sft_loss_weight", loss.sft_weight)
    if algorithm.algorithm == "rpo":
        draft.adapter["rpo"] = {"eta": loss.eta, "distance": loss.distance}
    draft.put("lengths.total", "policy.max_total_sequence_length", algorithm.lengths.context)
    draft.put("lengths.total", "data.max_input_seq_length", algorithm.lengths.context)
    _duration(draft, algorithm, "dpo")


def _duration(draft: Draft, algorithm: Algorithm, section: Section) -> None:
    if algorithm.steps is not None:
        draft.put("schedule.steps", f"{section}.max_num_steps", algorithm.steps)
    # The number of steps ends a run; epochs would end it earlier if the user has less data than the paper.
    epochs = algorithm.schedule.epochs
    draft.put("schedule.epochs", f"{section}.max_num_epochs", _FOREVER if epochs is None else epochs)
    validation = algorithm.validation
    draft.put("validation.every", f"{section}.val_period", validation.every or 0)
    draft.put("validation.at_start", f"{section}.val_at_start", validation.at_start)
    if validation.kl:
        draft.cannot(
            "validation.kl", "NeMo-RL measures the KL only in training, with loss.kl; validations do not measure it"
        )
    if validation.every is not None:
        draft.put("validation.every", "checkpointing.save_period", validation.every)
    # 0.7 requires a number.
    draft.put("validation.keep_best", "checkpointing.keep_top_k", validation.keep_best or ALL)
    if validation.every is None:
        # NeMo-RL's default metric comes from validations, which the run does not have.
        draft.put("validation", "checkpointing.metric_name", None)


def _optimizer(draft: Draft, algorithm: Algorithm, backend: Backend) -> None:
    optimizer, warmup, total = algorithm.optimizer, algorithm.warmup, algorithm.steps
    schedule, last = algorithm.schedule, algorithm.optimizer.learning_rate * algorithm.schedule.final_share
    draft.put("optimizer.clip_gradient", "policy.max_grad_norm", optimizer.clip_gradient)
    if backend == "megatron":
        values: dict[str, Any] = {
            "lr": optimizer.learning_rate,
            "min_lr": optimizer.learning_rate if schedule.kind == "constant" else last,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "clip_grad": optimizer.clip_gradient,
        }
        draft.put_all("optimizer", "policy.megatron_cfg.optimizer", values)
        values = {
            "start_weight_decay": optimizer.weight_decay,
            "end_weight_decay": optimizer.weight_decay,
            "lr_warmup_iters": warmup,
            "lr_warmup_init": 0.0,
            "lr_decay_style": schedule.kind,
            # Megatron requires more decay steps than warm-up steps even without decay.
            "lr_decay_iters": max(total or 0, warmup + 1),
        }
        draft.put_all("schedule", "policy.megatron_cfg.scheduler", values)
        return
    draft.put("optimizer", "policy.optimizer.name", "torch.optim.AdamW")
    kwargs = {"lr": optimizer.learning_rate, "betas": list(optimizer.betas), "eps": optimizer.eps}
    draft.put_all("optimizer", "policy.optimizer.kwargs", kwargs | {"weight_decay": optimizer.weight_decay})
    draft.put("schedule", "policy.scheduler", _torch_schedule(algorithm, last))


def _torch_schedule(algorithm: Algorithm, last: float) -> list[dict[str, Any]]:
    """Return the list of schedulers in NeMo-RL's format for torch's SequentialLR; `last` is the final learning rate."""
    schedule, warmup = algorithm.schedule, algorithm.warmup
    if schedule.kind == "constant":
        after = ("ConstantLR", {"factor": 1.0, "total_iters": _FOREVER})
    else:
        steps = max((algorithm.steps or 0) - warmup, 1)
        after = {
            "linear": ("LinearLR", {"start_factor": 1.0, "end_factor": schedule.final_share, "total_iters": steps}),
            "cosine": ("CosineAnnealingLR", {"T_max": steps, "eta_min": last}),
        }[schedule.kind]
    parts = [after]
    if warmup:
        # LinearLR must start above 0: the first warm-up step has 1 / warmup of the rate, the last one the full rate.
        growth: Mapping[str, Any] = {"start_factor": 1 / warmup, "end_factor": 1.0, "total_iters": max(warmup - 1, 1)}
        parts.insert(0, ("LinearLR", dict(growth)))
    listed: list[dict[str, Any]] = [
        {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for name, kwargs in parts
    ]
    return [*listed, {"milestones": [warmup] if warmup else []}]


def _router(draft: Draft, algorithm: Algorithm, backend: Backend) -> None:
    router = algorithm.router
    if backend == "megatron":
        draft.put("router.frozen", "policy.megatron_cfg.freeze_moe_router", router.frozen)
        draft.put("router.bias_update_rate", "policy.megatron_cfg.moe_router_bias_update_rate", router.bias_update_rate)
        if router.replay:
            draft.put("router.replay", "policy.router_replay.enabled", True)
        return
    if router.frozen:
        draft.cannot("router.frozen", "only the megatron backend can freeze routers; they are trained")
    if router.bias_update_rate:
        draft.cannot("router.bias_update_rate", "only the megatron backend updates the bias; it stays constant")
    if router.replay:
        draft.cannot("router.replay", "only the megatron backend replays routing; routers select experts again")
