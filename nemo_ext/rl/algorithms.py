"""RL algorithms described by one set of settings for all engines; presets hold the papers' values.

A preset is a file in `hydra_conf/rl`. Renderers translate it for an engine and report settings that the engine cannot
express (`nemo_ext.rl.nemo_rl.render`, `nemo_ext.rl.trl.render`, `nemo_ext.rl.rendering`).
"""

from collections.abc import Mapping
from dataclasses import field
from math import ceil
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.registry import config_files
from nemo_ext.job.settings import STRICT, Share, check_keys, checked, nearest
from nemo_ext.rl.environments import GYM, known_environments
from nemo_ext.rl.task import Task

Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
Negative = Annotated[FiniteFloat, Field(lt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Advantage:
    """Settings of advantages within a group, computed by `nemo_ext.rl.rewards.advantages.group_advantages`."""

    # mean reward of the group, or of the other responses of the group
    baseline: Literal["mean", "leave_one_out"]
    # division by the standard deviation over n responses (`std`), over n - 1 (`unbiased_std`), or none
    normalise: Literal["std", "unbiased_std", "none"]
    clip: Positive | None = None  # bound of an advantage's absolute value; null for none


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Kl:
    """Settings of the KL penalty in the loss, which keeps the policy close to the reference policy."""

    coefficient: NonNegative = 0.0  # weight of the penalty; 0 for none
    estimator: Literal["k1", "k2", "k3"] = "k3"  # one of Schulman's (http://joschu.net/blog/kl-approx.html)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImportanceCorrection:
    """Settings of importance sampling, which corrects differences between generation's and training's probabilities."""

    # the loss is multiplied by the probability ratio (`untruncated`), by the ratio clamped to its bounds (`truncated`),
    # or by the ratio within its bounds and 0 outside them (`masked`)
    kind: Literal["none", "untruncated", "truncated", "masked"] = "none"
    # one ratio per token, or one per response: the product of its tokens' ratios
    level: Literal["token", "sequence"] = "token"
    cap: Positive | None = None  # upper bound of the ratio
    floor: NonNegative | None = None  # lower bound of the ratio

    def __post_init__(self) -> None:
        if self.kind in ("none", "untruncated") and (self.cap is not None or self.floor is not None):
            raise ValueError(f"loss.importance_correction: kind={self.kind} takes neither cap nor floor; remove them")
        if self.kind in ("truncated", "masked") and self.cap is None:
            raise ValueError(f"loss.importance_correction: kind={self.kind} requires cap; set it to the maximum ratio")
        if self.kind == "masked" and self.floor is None:
            raise ValueError(
                "loss.importance_correction: kind=masked requires floor; set it to the minimum ratio (0 masks only "
                "large ratios)"
            )
        if self.cap is not None and self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"loss.importance_correction: floor={self.floor} must be below cap={self.cap}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyLoss:
    """Settings of the policy-gradient loss: averaging, clipping, KL penalty and importance sampling."""

    # mean over all tokens of a batch (`token`), or over its groups, each as the mean of all tokens of its responses
    # (`group`), or over its responses, each as the mean of its tokens (`sequence`) or as their sum (`sequence_sum`: a
    # response is one action, as in RLOO)
    level: Literal["token", "group", "sequence", "sequence_sum"]
    # probability ratio per token (PPO) or per response, the geometric mean over its tokens (GSPO)
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Share | None  # the ratio is clipped to 1 - clip_low ...
    clip_high: Positive | None  # ... to 1 + clip_high; null for both: no ratio (REINFORCE)
    # upper bound of the ratio for negative advantages; null for none
    dual_clip: Annotated[FiniteFloat, Field(gt=1)] | None = None
    kl: Kl = field(default_factory=Kl)
    importance_correction: ImportanceCorrection = field(default_factory=ImportanceCorrection)
    # maximum mean over a response's tokens of exp(|difference of its log-probabilities in generation and training|);
    # responses above it are excluded from the loss; null for no limit
    mismatch: Annotated[FiniteFloat, Field(ge=1)] | None = None
    # the ratio is exactly 1, so that its clipping has no effect and the log-probabilities before the update are not
    # computed, unless `mismatch` needs them; requires one update per step
    on_policy: bool = False

    def __post_init__(self) -> None:
        if (self.clip_low is None) != (self.clip_high is None):
            null, other = ("low", "high") if self.clip_low is None else ("high", "low")
            raise ValueError(
                f"loss.clip_{null}=null, but loss.clip_{other} is a number; set both to numbers or to null"
            )
        if self.clip_high is None and self.dual_clip is not None:
            raise ValueError(
                f"loss.dual_clip={self.dual_clip} bounds the ratio, but loss.clip_low=null and loss.clip_high=null "
                "disable the ratio; set loss.dual_clip=null"
            )
        if self.ratio == "sequence" and self.level in ("token", "group"):
            raise ValueError(
                f"loss.ratio=sequence requires loss.level=sequence (as in GSPO) or sequence_sum, not {self.level}"
            )
        if self.level == "group" and self.kl.coefficient:
            raise ValueError(
                "loss.level=group cannot be combined with a KL penalty, which has no advantage to scale; set "
                "loss.kl.coefficient=0, or another loss.level"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """Settings of sampling responses, including dynamic sampling, which drops groups of equal rewards."""

    temperature: Positive = 1.0  # softmax temperature
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # probability mass of nucleus sampling
    # drop groups whose rewards are all equal, and generate for more prompts instead
    drop_zero_variance: bool = False
    max_batches: PositiveInt | None = None  # maximum number of batches generated for one step

    def __post_init__(self) -> None:
        if self.drop_zero_variance != (self.max_batches is not None):
            raise ValueError(
                "sampling.drop_zero_variance=true and sampling.max_batches require each other, but only one is set; "
                "set both or neither"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lengths:
    """Maximum lengths of prompts and responses, in tokens."""

    prompt: PositiveInt | None = None  # prompt length; longer prompts are excluded from training
    response: PositiveInt | None = None  # length of a generated response
    total: PositiveInt | None = None  # length of prompt and response together

    @property
    def context(self) -> int | None:
        """Maximum length of prompt and response together, in tokens; None if it is unknown."""
        if self.total is not None:
            return self.total
        return None if self.response is None or self.prompt is None else self.prompt + self.response


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """Settings of the AdamW optimizer."""

    learning_rate: Positive
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01
    clip_gradient: Positive = 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """Settings of the learning rate schedule and of the length of training."""

    kind: Literal["constant", "linear", "cosine"] = "constant"  # decay after the warm-up
    warmup_steps: NonNegativeInt = 0  # steps of the linear warm-up
    warmup_share: Share | None = None  # fraction of all steps that are warm-up, instead of `warmup_steps`
    final_share: Share = 0.0  # final learning rate as a fraction of the maximum
    # number of steps, each of `prompts_per_step` prompts or a batch of pairs
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None  # passes over `examples`, instead of `steps`
    examples: PositiveInt | None = None  # number of prompts or pairs in the paper's data, from which steps are computed

    def __post_init__(self) -> None:
        if self.warmup_share is not None and self.warmup_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} and schedule.warmup_share={self.warmup_share} exclude each "
                "other; remove one"
            )
        if self.kind == "constant" and self.final_share:
            raise ValueError(
                f"schedule.final_share={self.final_share} has no effect with schedule.kind=constant; remove it, or set "
                "schedule.kind to linear or cosine"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"schedule.steps={self.steps} and schedule.epochs={self.epochs} cannot both be set; set one to null"
            )

    def total(self, examples_per_step: int) -> int | None:
        """Return the total number of steps; None unless `steps`, or both `epochs` and `examples`, are set.

        `examples_per_step` is the number of prompts or pairs per step.
        """
        if self.steps is not None:
            return self.steps
        return self.epochs * (self.examples // examples_per_step) if self.epochs and self.examples else None

    def warmup(self, total: int | None) -> int:
        """Return the number of warm-up steps; raise ValueError if it is a share and `total` is unknown."""
        if self.warmup_share is None:
            return self.warmup_steps
        if total is None:
            raise ValueError(
                f"schedule.warmup_share={self.warmup_share} requires a total number of steps; set schedule.steps, or "
                "schedule.epochs and schedule.examples"
            )
        return ceil(self.warmup_share * total)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Asynchronous:
    """Settings of asynchronous RL, in which generation and training run at the same time."""

    max_age: PositiveInt = 1  # maximum age, in optimizer steps, of the weights that generated a response
    # update the weights during generation and recompute the KV cache; otherwise wait until all responses are complete
    in_flight: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Router:
    """Settings for training the router of a mixture-of-experts model."""

    frozen: bool = False  # True if the router's weights are not trained
    # update rate of the expert bias that balances the load; 0 leaves the bias unchanged
    bias_update_rate: NonNegative = 0.0
    # train every token with the experts that were selected for it during generation (R3, arXiv 2510.11370)
    replay: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Validation:
    """Settings of validation during training: when to validate, and which checkpoints to keep."""

    every: PositiveInt | None = None  # steps between validations; null for never
    at_start: bool = False  # validate before the first step
    keep_best: PositiveInt | None = None  # number of checkpoints to keep, by validation accuracy; null keeps all
    # measure the KL divergence from the initial model on validation responses; needs a second copy of the weights
    kl: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvironmentUse:
    """Share, reward and settings of an environment that a preset uses."""

    weight: Positive = 1.0  # share of the prompts, relative to the sum of all weights
    # name of the reward, or a mapping with `name` and its arguments (`nemo_ext.rl.rewards`)
    reward: str | Mapping[str, Any] = "outcome"
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the environment
    concurrency: PositiveInt | None = None  # number of responses that are verified concurrently; null for 64

    def episodes(self) -> dict[str, Any]:
        """Return the keys of `nemo_ext.rl.episodes.EpisodeSettings` that are set."""
        others = {"settings": dict(self.settings), "concurrency": self.concurrency}
        return {"reward": self.reward, **{name: value for name, value in others.items() if value}}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupReward:
    """Settings of rewards that depend on all responses to a prompt (`nemo_ext.rl.rewards.comparison`)."""

    # settings of the generative reward model (`nemo_ext.rl.judge.JudgeSettings`) for circular comparison of the
    # responses; null keeps the environments' rewards as base
    judge: Mapping[str, Any] | None = None
    # format of the judge's prompt: `genrm` for a reward model whose chat template has roles for responses,
    # `instructed` for any chat model, `reward_model` for a model that scores each response separately
    show: Literal["genrm", "instructed", "reward_model"] = "genrm"
    both_orders: bool = False  # judge each pair in both orders: 2N comparisons of N responses instead of the paper's N
    # coefficients of `nemo_ext.rl.rewards.comparison.LengthControl`
    length_control: Mapping[str, FiniteFloat] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return the settings in the form that `nemo_ext.rl.groups.group_reward` takes."""
        judge = {"judge": self.judge, "show": self.show, "both_orders": self.both_orders} if self.judge else {}
        return judge | ({"length_control": dict(self.length_control)} if self.length_control else {})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Logits:
    """Settings of distillation from the teacher's distribution at each generated token; the loss is a KL divergence."""

    # number of the teacher's most likely tokens, among which both distributions are normalised; null for all tokens
    top_k: PositiveInt | None = None
    # share of KL(teacher || policy) in the loss; the rest is KL(policy || teacher)
    forward_share: Share = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Distillation:
    """On-policy distillation: a token's advantage is how much more likely the teacher finds it than the policy does.

    The advantage is the teacher's log-probability of a sampled token minus the policy's, in nats, without gradient
    (MiMo-V2-Flash, arXiv 2601.02780, equation 8); it replaces the advantage from rewards, which are only reported.
    """

    # teachers by environment or domain: Hugging Face folders, or with TRL URLs and run directories of `nemo-ext serve`;
    # `default` is the teacher of all others; null for none
    teachers: Mapping[str, Annotated[str, Field(min_length=1)] | None]
    by: Literal["environment", "domain"] = "environment"  # which name of a task selects its teacher
    clip: Positive | None = None  # bound of an advantage's absolute value, in nats; null for none
    logits: Logits | None = None  # learn from the teachers' distributions; null for advantages of the sampled tokens

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError(
                "distillation.teachers has no teacher; set distillation.teachers.default to a Hugging Face folder"
            )
        if self.logits is not None and self.clip is not None:
            raise ValueError(
                f"distillation.clip={self.clip:g} bounds advantages, which distillation.logits replaces; set "
                "distillation.clip=null"
            )

    @property
    def places(self) -> dict[str, str]:
        """Mapping from the teachers' names to their folders or endpoints."""
        return {name: place for name, place in self.teachers.items() if place is not None}

    def teacher(self, task: Task) -> str:
        """Return the name of a task's teacher; raise ValueError if it has none."""
        name: str = getattr(task, self.by)
        if name not in self.places and DEFAULT not in self.places:
            raise ValueError(
                f"rl.distillation.teachers has no teacher for {self.by} {name!r}; set {name} or default in "
                "rl.distillation.teachers"
            )
        return name if name in self.places else DEFAULT


DEFAULT = "default"
"""Name of the teacher of tasks that have no other."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Penalties:
    """Penalties for malformed responses: the advantage of every token, instead of that from rewards or teachers.

    In a conversation, each turn counts as a response. Responses cut off at the length limit are never malformed.
    """

    thinking: Negative | None = None  # thinking tags other than one complete trace at the start, or none; null for none
    tool_call: Negative | None = None  # tool calls that cannot be parsed; takes precedence; null for none

    @property
    def any(self) -> bool:
        """True if any penalty is set."""
        return self.thinking is not None or self.tool_call is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Curriculum:
    """Settings that `nemo-ext curriculum` must have used to make the curriculum in `tasks.train.curriculum`."""

    drop_from: Share | None = None  # prompts with this pass rate or a higher one are excluded; null for none
    easy_to_hard: bool = False  # lower the target pass rate during training


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Training:
    """Settings shared by all algorithms."""

    source: str  # paper and section
    # number of responses or pairs per update; all responses of a step give one on-policy update per step
    batch: PositiveInt
    optimizer: Optimizer
    lengths: Lengths = field(default_factory=Lengths)
    schedule: Schedule = field(default_factory=Schedule)
    router: Router = field(default_factory=Router)
    validation: Validation = field(default_factory=Validation)

    def __post_init__(self) -> None:
        kind, share = self.schedule.kind, self.schedule.warmup_share
        if (share is not None or kind != "constant") and not self.steps:
            setting = f"kind={kind}" if share is None else f"warmup_share={share}"
            raise ValueError(
                f"schedule.{setting} requires a total number of steps; set schedule.steps, or schedule.epochs and "
                "schedule.examples, with enough examples for one step"
            )

    @property
    def examples_per_step(self) -> int:
        """Number of prompts or pairs per step."""
        return self.batch

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per step, all on the same generated responses."""
        return 1

    @property
    def steps(self) -> int | None:
        """Total number of steps, or None if the schedule does not determine it."""
        return self.schedule.total(self.examples_per_step)

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""
        return self.schedule.warmup(self.steps)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradient(_Training):
    """Settings of GRPO and related algorithms, which train on rewards for responses that the policy generates."""

    algorithm: Literal["grpo", "rloo"]  # selects the trainer of an engine that has one for each
    prompts_per_step: PositiveInt  # number of prompts per generation step
    generations_per_prompt: PositiveInt  # number of responses per prompt
    passes: PositiveInt = 1  # passes over a step's responses
    advantage: Advantage | None = None  # from rewards; null with `distillation`
    distillation: Distillation | None = None  # learn from teachers instead of rewards
    loss: PolicyLoss
    penalties: Penalties = field(default_factory=Penalties)
    sampling: Sampling = field(default_factory=Sampling)
    overlong_filtering: bool = False  # exclude responses cut off at the length limit from the loss
    # maximum number of responses in a conversation with tools, for environments whose settings have no `max_turns`; 1
    # for the environments' own maximum
    turns: PositiveInt = 1
    asynchronous: Asynchronous | None = None
    # share of the prompts of each task file in thinking mode; null for the modes that the tasks set
    thinking_share: Share | None = None
    # environments by name; empty for the environments that the task files name
    environments: Mapping[str, EnvironmentUse] = field(default_factory=dict)
    group: GroupReward | None = None
    curriculum: Curriculum | None = None  # order of the prompts by their pass rates; null for any order

    def __post_init__(self) -> None:
        if self.responses_per_step % self.batch:
            raise ValueError(
                f"batch={self.batch} must divide prompts_per_step x generations_per_prompt = {self.responses_per_step}"
            )
        if self.lengths.response is None or self.lengths.context is None:
            raise ValueError(
                f"lengths.{'response is' if self.lengths.response is None else 'prompt and lengths.total are'} null; "
                "set lengths.response, and either lengths.prompt or lengths.total"
            )
        if (self.advantage is None) == (self.distillation is None):
            raise ValueError(
                f"advantage and distillation are both {'null' if self.advantage is None else 'set'}; set exactly one: "
                "advantage to learn from rewards, or distillation to learn from teachers"
            )
        if self.distillation is None and self.generations_per_prompt < 2:
            raise ValueError(
                "generations_per_prompt=1 is too small, because an advantage compares the responses to a prompt; set "
                "it to at least 2"
            )
        if self.distillation is not None:
            self._check_distillation()
        if self.loss.on_policy and self.updates_per_step > 1:
            raise ValueError(
                f"loss.on_policy=true requires one update per step, not {self.updates_per_step}; set batch to "
                f"prompts_per_step x generations_per_prompt = {self.responses_per_step}, and passes=1"
            )
        section = "distillation" if self.advantage is None else "advantage"
        clip = getattr(self, section).clip
        for name in ("thinking", "tool_call"):
            value = getattr(self.penalties, name)
            if clip is not None and value is not None and -value > clip:
                raise ValueError(f"penalties.{name}={value:g} exceeds {section}.clip={clip:g}; raise {section}.clip")
        if self.loss.level == "group" and (self.updates_per_step > 1 or self.algorithm != "grpo"):
            raise ValueError(
                "loss.level=group requires algorithm=grpo and one update per step, on whole groups; set "
                f"algorithm=grpo, batch={self.responses_per_step} and passes=1, or another loss.level"
            )
        known = {*known_environments(), *(name for name in self.environments if name.startswith(GYM))}
        check_keys(self.environments, sorted(known), required=(), where="environments")
        super().__post_init__()

    def _check_distillation(self) -> None:
        if self.algorithm != "grpo":
            raise ValueError(f"algorithm={self.algorithm} does not support distillation; set algorithm=grpo")
        if self.sampling.drop_zero_variance:
            raise ValueError(
                "sampling.drop_zero_variance=true cannot be combined with distillation, which also learns from groups "
                "with equal rewards; set sampling={drop_zero_variance: false, max_batches: null}"
            )
        if self.sampling.temperature != 1:
            raise ValueError(
                f"distillation compares probabilities at temperature 1, not {self.sampling.temperature:g}; set "
                "sampling.temperature=1"
            )
        if self.group is not None:
            raise ValueError(
                "group, which changes rewards over groups, does not affect distillation; set group=null, or train "
                "without distillation"
            )
        if self.logits is None:
            return
        if self.loss != PolicyLoss(level="token", clip_low=None, clip_high=None):
            raise ValueError(
                "distillation.logits replaces the policy's loss; set loss={level: token, clip_low: null, clip_high: "
                "null} without other keys"
            )
        for key, used in {
            "asynchronous": self.asynchronous is not None,
            "penalties": self.penalties.any,
            "router.replay": self.router.replay,
        }.items():
            if used:
                raise ValueError(f"{key} cannot be combined with distillation.logits; remove one of them")

    @property
    def logits(self) -> Logits | None:
        """Settings of distillation from distributions; None for a loss with advantages."""
        return None if self.distillation is None else self.distillation.logits

    @property
    def responses_per_step(self) -> int:
        """Number of responses generated per step."""
        return self.prompts_per_step * self.generations_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per step, all on the same generated responses."""
        return self.passes * self.responses_per_step // self.batch

    @property
    def examples_per_step(self) -> int:
        """Number of prompts per generation step."""
        return self.prompts_per_step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceLoss:
    """Settings of the loss on preference pairs."""

    beta: Positive  # scale of the policy's implicit rewards, which the papers also call KL penalty or KL coefficient
    length_normalised: bool = False  # mean of the implicit rewards over tokens instead of their sum
    weight: NonNegative = 1.0  # weight of the preference loss
    sft_weight: NonNegative = 0.0  # weight of the chosen response's negative log-likelihood
    sft_length_normalised: bool = True  # mean of that loss over tokens instead of their sum
    eta: Positive | None = None  # scale of the true rewards; only for rpo
    # distance between the margins (`nemo_ext.rl.rpo`); only for rpo
    distance: Literal["backward_kl", "forward_kl", "squared"] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Online:
    """Settings of online preference training, on pairs of the policy's own responses."""

    # number of responses per prompt; the best and the worst by the reward model form a pair
    generations_per_prompt: Annotated[int, Field(ge=2)]
    rounds: PositiveInt = 1  # number of rounds, each from the weights of the previous one


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Preference(_Training):
    """Settings of DPO and RPO, which train on pairs of responses."""

    algorithm: Literal["dpo", "rpo"]  # `rpo` fits the margin to true rewards
    loss: PreferenceLoss
    online: Online | None = None

    def __post_init__(self) -> None:
        if self.router.replay:
            raise ValueError(
                f"router.replay=true requires responses generated during training, but algorithm={self.algorithm} "
                "trains on pairs; set router.replay=false"
            )
        if self.lengths.total is None:
            raise ValueError("lengths.total=null: set it to the maximum length of prompt and response together")
        given = [name for name in ("eta", "distance") if getattr(self.loss, name) is not None]
        if self.algorithm == "rpo" and len(given) < 2:
            raise ValueError(
                "algorithm=rpo requires loss.eta and loss.distance; set loss.eta to a number above 0, and "
                "loss.distance to backward_kl, forward_kl or squared"
            )
        if self.algorithm == "dpo" and given:
            raise ValueError(f"loss.{given[0]} is only for algorithm=rpo, not for dpo; remove it")
        super().__post_init__()


Algorithm = PolicyGradient | Preference

_KINDS: Mapping[str, type[Algorithm]] = {
    "grpo": PolicyGradient,
    "rloo": PolicyGradient,
    "dpo": Preference,
    "rpo": Preference,
}


def of_steps(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return section `rl`, with the preset's epochs removed if a number of steps is set."""
    schedule = section.get("schedule") or {}
    if schedule.get("steps") is None:
        return section
    return {**section, "schedule": {**schedule, "epochs": None, "examples": None}}


def algorithm_of(config: Mapping[str, Any], *, where: str = "algorithm") -> Algorithm:
    """Build an algorithm from a config with this module's keys.

    Raises:
        ValueError: the config is invalid; the message names the key, its value and the allowed values.
    """
    kind = str(config.get("algorithm"))
    if kind not in _KINDS:
        raise ValueError(f"{where}: unknown algorithm {kind!r}; {nearest(kind, _KINDS)}")
    algorithm: Algorithm = checked(_KINDS[kind], config, where=where)
    return algorithm


def presets() -> tuple[str, ...]:
    """Return the sorted names of all presets."""
    return tuple(config_files("rl"))


def load(preset: str, changes: Mapping[str, Any] | None = None) -> Algorithm:
    """Load a preset's algorithm.

    Args:
        preset: name of the preset; see `presets`.
        changes: settings merged into the preset, such as `{"loss": {"kl": {"coefficient": 0.01}}}`; null removes one.

    Raises:
        ValueError: the preset is unknown, or its settings are invalid after the changes.
    """
    files = config_files("rl")
    if preset not in files:
        raise ValueError(f"unknown RL preset {preset!r}: {nearest(preset, files)}")
    config = OmegaConf.create(files[preset].read_text(encoding="utf-8"))
    merged = OmegaConf.to_container(OmegaConf.merge(config, dict(changes or {})), resolve=True)
    assert isinstance(merged, dict)
    return algorithm_of({str(key): value for key, value in merged.items()}, where=f"rl preset {preset}")
