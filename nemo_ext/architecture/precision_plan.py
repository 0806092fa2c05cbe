"""Precision of each weight in a model: a default, and a list of rules; the first rule that matches a weight applies.

A rule is a selector and a precision, such as `M>* bf16`. Selectors:

    *           blocks of a kind                  M>*        M blocks immediately before an attention block
    5,12        blocks by their number, from 0    M<*        M blocks immediately after one
    first 2     the first two blocks              last 15%   the last 15 % of all blocks, rounded, at least one
    .conv1d     a part of every block             M.in_proj  a part of blocks of a kind; any selector may name a part
    embedding   the embedding                     head       the output layer

FP8 and NVFP4 apply only to linear layers; other parts of a block (`conv1d`, routers) are in BF16 unless a rule sets
FP32. Latent projections are in FP8 or NVFP4 only if a rule names them (`E.latent_fc1 fp8`), as published plans keep
them in BF16. Plans name blocks of the main model; the depths of multi-token prediction are in BF16.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from nemo_ext.architecture.blocks import LINEAR, NAMES, Block
from nemo_ext.architecture.model import CONV_KERNEL, Architecture
from nemo_ext.architecture.precision import BYTES, NVFP4_BITS, NVFP4_BLOCK
from nemo_ext.architecture.widths import attention_widths, expert_width, first_width, mamba_widths
from nemo_ext.job.settings import check_keys, nearest

EMBEDDING, HEAD = "embedding", "head"
PARTS: dict[str, tuple[str, ...]] = {
    "M": ("in_proj", "conv1d", "out_proj"),
    "*": ("qkv", "proj"),
    "-": ("fc1", "fc2"),
    "E": ("router", "fc1", "fc2", "shared_fc1", "shared_fc2", "latent_fc1", "latent_fc2"),
}
"""Mapping from block kinds to their parts with weights; a linear-replaced block has only the part `linear`."""
NO_FP8 = frozenset({"conv1d", "router", LINEAR, EMBEDDING})
"""Parts that are not Transformer Engine's linear layers, and thus cannot be in FP8 or NVFP4."""
ONLY_NAMED = frozenset({"latent_fc1", "latent_fc2"})
"""Parts in FP8 or NVFP4 only if a rule names the part, not by the default or a rule for whole blocks."""
RECIPES: dict[str, int] = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Mapping from Megatron's names of Transformer Engine's FP8 recipes to the required divisor of matrix sizes: 16 for
cuBLAS, 128 for the tiles of blockwise scaling, 32 for MXFP8's blocks."""
NVFP4_MULTIPLE = 32
"""Required divisor of matrix sizes in NVFP4's products (Megatron-Core, core/fp4_utils.py)."""
SCALE_BITS = {"delayed": 0.0, "tensorwise": 0.0, "blockwise": 32 / 128**2, "mxfp8": 8 / 32}
"""Mapping from FP8 recipes to the bits of block scales per number of a stored weight."""
FORMATS = ("e4m3", "hybrid")
PRECISIONS = ("nvfp4", "fp8", "bf16", "fp32")
LOW = frozenset({"nvfp4", "fp8"})
"""Precisions in which a weight is quantised."""
NVFP4_FORMS = ("w4a4", "w4a16")
NANO_IN_BF16 = ("*", "M>*")
"""Selectors of the blocks that Nemotron 3 Nano keeps in BF16: attention, and Mamba blocks right before it (its paper's
section on FP8)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Matrix in a model, or several matrices of the same size.

    Attributes:
        block: 0-based number of its block; None for the embedding and the output layer.
        part: part of the block, or `embedding` or `head`.
        rows: output size.
        columns: input size.
        count: number of matrices of this size, more than 1 for experts.
    """

    block: int | None
    part: str
    rows: int
    columns: int
    count: int = 1

    @property
    def parameters(self) -> int:
        """Number of parameters in all `count` matrices."""
        return self.count * self.rows * self.columns

    def __str__(self) -> str:
        return self.part if self.block is None else f"block {self.block} {self.part}"


def weights(architecture: Architecture) -> list[Weight]:
    """Return all matrices in model order, without norms, biases and Mamba's per-head parameters (never in FP8).

    Raises:
        ValueError: a block's kind has no cost model.
    """
    vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
    matrices = [Weight(None, EMBEDDING, vocabulary, hidden)]
    for number, block in enumerate(architecture.sizes):
        matrices += _of_block(architecture, number, block)
    if not architecture.tied_embeddings:
        matrices.append(Weight(None, HEAD, vocabulary, hidden))
    return matrices


def _of_block(architecture: Architecture, number: int, block: Block) -> Iterator[Weight]:
    hidden = architecture.hidden_size
    if block.is_linear:
        yield Weight(number, LINEAR, hidden, hidden)
    elif block.kind == "M":
        inner, channels, projected = mamba_widths(block)
        yield Weight(number, "in_proj", projected, hidden)
        yield Weight(number, "conv1d", channels, CONV_KERNEL)
        yield Weight(number, "out_proj", hidden, inner)
    elif block.kind == "*":
        query, _, projected = attention_widths(architecture, block)
        yield Weight(number, "qkv", projected, hidden)
        yield Weight(number, "proj", hidden, query)
    elif block.kind == "-":
        ffn = block.size("ffn")
        yield Weight(number, "fc1", first_width(architecture, ffn), hidden)
        yield Weight(number, "fc2", hidden, ffn)
    elif block.kind == "E":
        experts, ffn, shared = map(block.size, ("experts", "ffn", "shared"))
        width = expert_width(architecture, block)
        yield Weight(number, "router", experts, hidden)
        yield Weight(number, "fc1", first_width(architecture, ffn), width, experts)
        yield Weight(number, "fc2", width, ffn, experts)
        if shared:
            yield Weight(number, "shared_fc1", first_width(architecture, shared), hidden)
            yield Weight(number, "shared_fc2", hidden, shared)
        if block.size("latent"):
            yield Weight(number, "latent_fc1", width, hidden)
            yield Weight(number, "latent_fc2", hidden, width)
    else:
        raise ValueError(
            f"block {number}: precision plans do not support {block.name} blocks yet; unset precision_plan"
        )


@dataclass(frozen=True, slots=True)
class Selector:
    """Selector of blocks, or of a part of blocks.

    Attributes:
        kind: kind of the blocks; "" for all.
        before: kind of the block that must follow; "" for any.
        after: kind of the block that must precede; "" for any.
        numbers: 0-based block numbers; empty for all.
        first: number of blocks counted from the start of the model; 0 for all.
        last: number of blocks counted from the end of the model; 0 for all.
        percent: True if `first` or `last` is a percentage of all blocks.
        part: part of the blocks, "" for all; or `embedding` or `head`, which belong to no block.
    """

    kind: str = ""
    before: str = ""
    after: str = ""
    numbers: tuple[int, ...] = ()
    first: int = 0
    last: int = 0
    percent: bool = field(default=False, repr=False)
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> "Selector":
        """Parse a selector in the module's notation.

        Raises:
            ValueError: the string is not a selector; the message lists the valid forms.
        """
        if text in (EMBEDDING, HEAD):
            return cls(part=text)
        where, dot, part = text.partition(".")
        parts = {part for parts in PARTS.values() for part in parts} | {LINEAR}
        if dot and part not in parts:
            raise ValueError(f"precision_plan.rules: {text!r} names the unknown part {part!r}; {nearest(part, parts)}")
        where = where.strip()
        if found := re.fullmatch(r"(first|last)\s+([1-9]\d*)(%?)", where):
            count, percent = int(found[2]), bool(found[3])
            if percent and count > 100:
                raise ValueError(
                    f"precision_plan.rules: {text!r} selects more than 100 % of the blocks: lower the percentage"
                )
            if found[1] == "first":
                return cls(part=part, first=count, percent=percent)
            return cls(part=part, last=count, percent=percent)
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", where):
            return cls(part=part, numbers=tuple(sorted({int(number) for number in where.split(",")})))
        found = re.fullmatch(r"([^<>]?)\s*(?:([<>])\s*([^<>]))?", where)
        if found is None or (not where and not part) or any(kind not in NAMES for kind in (found[1], found[3]) if kind):
            raise ValueError(
                f"precision_plan.rules: {text!r} is not a selector; expected a block kind ({' '.join(PARTS)}), "
                f"KIND>KIND, KIND<KIND, numbers such as 5,12, 'first N', 'last N', 'last N%', {EMBEDDING} or {HEAD}, "
                "optionally followed by a dot and a part"
            )
        kind, side, other = found[1], found[2], found[3] or ""
        if kind and part and part not in (*PARTS.get(kind, ()), LINEAR):
            raise ValueError(
                f"precision_plan.rules: {text!r} must name one of the parts of {NAMES[kind]} blocks, "
                f"{', '.join(PARTS.get(kind, ()))}, not {part}"
            )
        return cls(kind=kind, before=other if side == ">" else "", after=other if side == "<" else "", part=part)

    def selects(self, weight: Weight, kinds: Sequence[str]) -> bool:
        """Return whether the selector matches a weight.

        Args:
            weight: weight of the model.
            kinds: kinds of the model's blocks, in order.
        """
        number = weight.block
        if number is None or self.part in (EMBEDDING, HEAD):
            return number is None and self.part == weight.part
        following = kinds[number + 1] if number + 1 < len(kinds) else ""
        first, last = (self._blocks(count, len(kinds)) for count in (self.first, self.last))
        return (
            self.kind in ("", kinds[number])
            and self.before in ("", following)
            and self.after in ("", kinds[number - 1] if number else None)
            and (not self.numbers or number in self.numbers)
            and (not first or number < first)
            and (not last or number >= len(kinds) - last)
            and self.part in ("", weight.part)
        )

    def _blocks(self, count: int, blocks: int) -> int:
        return max(1, (blocks * count + 50) // 100) if count and self.percent else count


@dataclass(frozen=True, slots=True)
class Rule:
    """Selector, the precision of the weights that it selects, and the rule's original text."""

    selector: Selector
    precision: str
    text: str

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parse a rule of the form `SELECTOR PRECISION`.

        Raises:
            ValueError: the selector is invalid, or the precision is missing, unknown or not available for the part.
        """
        where, _, precision = text.strip().rpartition(" ")
        if precision not in PRECISIONS or not where:
            raise ValueError(
                f"precision_plan.rules: {text!r} is not a rule; expected a selector and one of "
                f"{', '.join(PRECISIONS)}, such as 'M>* bf16'"
            )
        selector = Selector.parse(where.strip())
        if precision in LOW and selector.part in NO_FP8:
            raise ValueError(
                f"precision_plan.rules: {text!r} is invalid, as {selector.part} does not support "
                f"{precision.upper()}: use bf16 or fp32"
            )
        return cls(selector, precision, text.strip())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Precisions of all weights of a model.

    Attributes:
        default: precision of weights that no rule selects; if it is FP8 or NVFP4, parts that do not support it and
            latent projections are in BF16.
        recipe: FP8 scaling recipe, one of RECIPES.
        format: FP8 format, e4m3 or hybrid (e5m2 for gradients).
        nvfp4: `w4a4`, or `w4a16` for products of NVFP4 weights with BF16 inputs.
        rules: rules in order; the first that selects a weight applies.
        kv_cache: precision of the KV cache during generation.
    """

    default: str = "bf16"
    recipe: str = "tensorwise"
    format: str = "e4m3"
    nvfp4: str = field(default="w4a4", repr=False)
    rules: tuple[Rule, ...] = ()
    kv_cache: str = "bf16"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("default", self.default, PRECISIONS),
            ("recipe", self.recipe, tuple(RECIPES)),
            ("format", self.format, FORMATS),
            ("nvfp4", self.nvfp4, NVFP4_FORMS),
            ("kv_cache", self.kv_cache, ("bf16", "fp8")),
        ):
            if value not in allowed:
                raise ValueError(f"precision_plan.{name}={value!r}: expected one of {', '.join(allowed)}")

    @classmethod
    def from_config(cls, section: Mapping[str, object]) -> "Plan":
        """Read a run's `precision_plan` section.

        Raises:
            ValueError: a key is unknown or a value is invalid.
        """
        if not isinstance(section, Mapping):
            raise ValueError(
                f"precision_plan={section!r}: expected a section; set its keys, or choose a plan with precision=NAME"
            )
        check_keys(section, tuple(cls.__dataclass_fields__), required=(), where="precision_plan")
        values = dict(section)
        rules = values.pop("rules", ()) or ()
        if isinstance(rules, str) or not isinstance(rules, Sequence):
            raise ValueError(f"precision_plan.rules={rules!r}: expected a list of rules such as 'M>* bf16'")
        return cls(rules=tuple(Rule.parse(str(rule)) for rule in rules), **values)  # type: ignore[arg-type]

    @property
    def uses_fp8(self) -> bool:
        """Whether any weight may be in FP8."""
        return self._uses("fp8")

    @property
    def uses_nvfp4(self) -> bool:
        """Whether any weight may be in NVFP4."""
        return self._uses("nvfp4")

    def bits(self, precision: str) -> float:
        """Return the bits per number of a weight stored in a precision, including block scales."""
        if precision == "nvfp4":
            return NVFP4_BITS
        return 8 * BYTES[precision] + (SCALE_BITS[self.recipe] if precision == "fp8" else 0)

    def _uses(self, precision: str) -> bool:
        return precision in (self.default, *(rule.precision for rule in self.rules))


@dataclass(frozen=True, slots=True)
class Assigned:
    """Weight, its precision, and the rule that determined the precision; the rule is None for the plan's default."""

    weight: Weight
    precision: str
    rule: Rule | None

    @property
    def bytes(self) -> int:
        """Size of the weight in bytes, as stored for generation; in NVFP4 with the scales of its blocks."""
        return stored_bytes(self.weight, self.precision)


def stored_bytes(weight: Weight, precision: str) -> int:
    """Return the size of a weight in bytes, as stored for generation; in NVFP4 with the scales of its blocks."""
    if precision == "nvfp4":
        return ceil(weight.parameters * NVFP4_BITS / 8)
    return weight.parameters * BYTES[precision]


def assigned(plan: Plan, architecture: Architecture) -> list[Assigned]:
    """Determine the precision of every weight, in model order.

    Raises:
        ValueError: a rule names a block that does not exist, or a part that none of its numbered blocks has.
    """
    kinds = [block.kind for block in architecture.sizes]
    for rule in plan.rules:
        if beyond := [number for number in rule.selector.numbers if number >= len(kinds)]:
            raise ValueError(
                f"precision_plan.rules: {rule.text!r} names block {beyond[0]}, but the model has blocks 0 to "
                f"{len(kinds) - 1}: correct the rule"
            )
        if rule.selector.numbers and not any(rule.selector.selects(weight, kinds) for weight in weights(architecture)):
            raise ValueError(
                f"precision_plan.rules: {rule.text!r} selects nothing, as none of its blocks has the part "
                f"{rule.selector.part!r}: name other blocks or another part"
            )
    precisions = []
    for weight in weights(architecture):
        first = next((rule for rule in plan.rules if rule.selector.selects(weight, kinds)), None)
        precision = plan.default if first is None else first.precision
        named = first is not None and first.selector.part == weight.part
        if precision in LOW and (weight.part in NO_FP8 or (weight.part in ONLY_NAMED and not named)):
            precision = "bf16"
        precisions.append(Assigned(weight, precision, first))
    return precisions


def low_shares(plan: Plan, architecture: Architecture) -> dict[int | None, float]:
    """Return a mapping from 0-based block numbers (None for the head) to the share of parameters in FP8 or NVFP4."""
    whole: dict[int | None, int] = {}
    low: dict[int | None, int] = {}
    for entry in assigned(plan, architecture):
        if entry.weight.part == EMBEDDING:
            continue
        number = entry.weight.block
        whole[number] = whole.get(number, 0) + entry.weight.parameters
        low[number] = low.get(number, 0) + (entry.weight.parameters if entry.precision in LOW else 0)
    return {number: low[number] / count for number, count in whole.items()}


def weight_bytes(plan: Plan, architecture: Architecture) -> dict[str, int]:
    """Return a mapping from precisions to the matrices' bytes, as stored for generation."""
    stored = dict.fromkeys(PRECISIONS, 0)
    for entry in assigned(plan, architecture):
        stored[entry.precision] += entry.bytes
    return stored


def multiple(plan: Plan, precision: str) -> tuple[str, int]:
    """Return the scaling used for a precision, and the divisor that its products require of a weight's sizes."""
    if precision == "nvfp4":
        return "nvfp4", NVFP4_MULTIPLE
    return (plan.recipe, RECIPES[plan.recipe]) if precision == "fp8" else (precision, 1)


def misfits(plan: Plan, architecture: Architecture, *, stored: bool = False) -> list[str]:
    """Return a message for each FP8 or NVFP4 weight whose size is not supported, with the nearest supported sizes.

    With `stored`, sizes only have to suit checkpoints, where NVFP4 needs whole blocks of 16.
    """
    lines = []
    for entry in assigned(plan, architecture):
        weight = entry.weight
        scaling, step = multiple(plan, entry.precision)
        if stored and entry.precision == "nvfp4":
            step = NVFP4_BLOCK
        for name, size in (("out", weight.rows), ("in", weight.columns)):
            if size % step:
                near = size // step * step or step
                lines.append(
                    f"{weight}: {name} {size} is not a multiple of {step} ({scaling}); use {near} or {near + step}"
                )
    return lines
