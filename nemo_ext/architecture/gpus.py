"""Peak rates of GPUs and the rates that kernels reach on them, from `hydra_conf/rates`; used by `step_time.py`."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.registry import config_files
from nemo_ext.job.settings import STRICT, checked, nearest

SLOWEST_LINK = 1e7
"""Bytes/s that every link exceeds; a smaller rate is in another unit."""


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


Rate = Annotated[float, BeforeValidator(_not_bool), Field(gt=0, allow_inf_nan=False)]
Rates = Annotated[dict[PositiveInt, Rate], Field(min_length=1)]
Products = dict[Literal["bf16", "fp8"], Rates]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Attention:
    """FLOP/s of causal attention, over the scores that the mask keeps.

    Attributes:
        forward: forward pass.
        backward: backward pass, of 2.5 times the forward pass's FLOPs, as it recomputes the scores.
    """

    forward: Rate
    backward: Rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Link:
    """Rates that NCCL reaches on a link.

    Attributes:
        gather: bytes/s that a GPU sends in a ring: all-gather, reduce-scatter.
        all_to_all: bytes/s that a GPU sends in an all-to-all, or to one GPU.
        latency: seconds that an empty message takes.
        mesh: whether each pair of GPUs has its own link, so that a group of fewer GPUs reaches only part of the rates.
    """

    gather: Rate
    all_to_all: Rate
    latency: Rate
    mesh: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gpu:
    """A GPU in its usual node: peak rates from data sheets, and the rates that kernels reach.

    Attributes:
        memory_gib: memory in GiB.
        capability: compute capability.
        flops: peak dense BF16 FLOP/s.
        bandwidth: peak memory bandwidth in bytes/s.
        nvlink: peak bandwidth to the other GPUs in its node, in bytes/s one way.
        network: peak share of the node's network bandwidth, in bytes/s one way.
        host: bandwidth from host memory in bytes/s.
        matmul: FLOP/s of matrix products by precision and the smallest of the product's three sizes.
        grouped: FLOP/s of the experts' grouped products by precision and smallest size, with one expert's tokens.
        attention: FLOP/s of attention.
        scan: FLOP/s of Mamba-2's scan over both passes; the backward pass counts twice the cost model's FLOPs.
        memory: bytes/s that memory-bound kernels reach.
        node: rates between GPUs of a node.
        between: rates between nodes, for each GPU of the node.
        sustained: share of the rates of dense BF16 products and of attention that remains in a run of hours, where
            power limits the clock and communication occupies SMs.
        estimates: names of the rates that are estimates, neither measured nor published.
        source: GPU, date and software versions of the measurement.
    """

    memory_gib: Annotated[PositiveFloat, BeforeValidator(_not_bool)]
    capability: tuple[int, int]
    flops: Rate
    bandwidth: Rate
    nvlink: Rate
    network: Rate
    host: Rate
    matmul: Products
    grouped: Products
    attention: Attention
    scan: Rate
    memory: Rate
    node: Link
    between: Link
    sustained: Annotated[float, BeforeValidator(_not_bool), Field(gt=0, le=1)] = 1.0
    estimates: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name, products in (("matmul", self.matmul), ("grouped", self.grouped)):
            for precision, rates in products.items():
                most = 1.2 * self.flops * (2 if precision == "fp8" else 1)
                if max(rates.values()) > most:
                    raise ValueError(
                        f"{name}.{precision} has {max(rates.values()):.3g} FLOP/s, more than 1.2 times the peak that "
                        f"flops={self.flops:.3g} implies; correct the rate or its unit"
                    )
        if self.memory > self.bandwidth:
            raise ValueError(
                f"memory={self.memory:.3g} exceeds bandwidth={self.bandwidth:.3g}, the peak of this rate; correct one "
                "of them"
            )
        for name, link in (("node", self.node), ("between", self.between)):
            for kind, rate in (("gather", link.gather), ("all_to_all", link.all_to_all)):
                if rate <= SLOWEST_LINK:
                    raise ValueError(
                        f"{name}.{kind}={rate:.3g}: expected more than {SLOWEST_LINK:.0e} bytes/s; convert the rate to "
                        "bytes/s"
                    )
        known = {*RATES, *(f"{link}.{field.name}" for link in ("node", "between") for field in fields(Link))}
        if unknown := [name for name in self.estimates if name not in known]:
            raise ValueError(f"estimates has {unknown[0]!r}, which is not a rate: {nearest(unknown[0], known)}")

    def product(self, grouped: bool, precision: Literal["bf16", "fp8"], *sizes: float) -> float:
        """Return the sustained FLOP/s of a matrix product, which depends on the smallest of its three `sizes`.

        With `grouped`, it is the experts' grouped product; otherwise, a dense one. Between two sizes in the GPU's
        file, the rate is interpolated over the logarithm of the size. Above the largest, it is constant; below the
        smallest, it is proportional to the size.

        Raises:
            ValueError: there are no rates for the precision.
        """
        rates = (self.grouped if grouped else self.matmul).get(precision)
        if rates is None:
            raise ValueError(
                f"the GPU's file has no {'grouped' if grouped else 'matmul'} rates in {precision}; use precision=bf16, "
                "or add them to the file"
            )
        size, known = min(sizes), sorted(rates)
        kept = self.sustained if precision == "bf16" and not grouped else 1.0
        if size <= known[0]:
            return kept * rates[known[0]] * size / known[0]
        if size >= known[-1]:
            return kept * rates[known[-1]]
        upper = next(number for number, each in enumerate(known) if each > size)
        low, high = known[upper - 1], known[upper]
        share = math.log(size / low) / math.log(high / low)
        return kept * (rates[low] + share * (rates[high] - rates[low]))


RATES = ("sustained", "matmul", "grouped", "attention", "scan", "memory", "node", "between")
"""Names of the rates that can be estimates."""


def read_gpu(text: str, name: str) -> Gpu:
    """Read the content of a GPU's file.

    Raises:
        ValueError: the text is not YAML, or a rate is missing or invalid.
    """
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML ({error}); correct it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: expected a mapping as in hydra_conf/rates, got {type(content).__name__}")
    return checked(Gpu, content, name)


def _packaged() -> dict[str, Gpu]:
    found = {name: read_gpu(file.read_text(encoding="utf-8"), name) for name, file in config_files("rates").items()}
    return dict(sorted(found.items(), key=lambda item: item[1].memory_gib))


GPUS = _packaged()
"""GPUs, keyed by their `node.gpu` names in `hydra_conf/cluster` and sorted by memory."""


def gpu_file(path: str) -> Gpu:
    """Read a GPU's file, such as `benchmarks/gpu_rates.py` writes.

    Raises:
        ValueError: the file does not exist or is invalid.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"gpu={path}: no such file; write it with benchmarks/gpu_rates.py, or name a known GPU")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"gpu={path} cannot be read ({error}); write it with benchmarks/gpu_rates.py") from error
    return read_gpu(text, path)
