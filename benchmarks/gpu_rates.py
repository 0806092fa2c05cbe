"""Rates of kernels on one GPU, and of its links, as a file for `gpu=` and `rehearse.gpu=`; about two minutes.

    python benchmarks/gpu_rates.py --base H100-80GB --output mine.yaml
    torchrun --nproc-per-node 8 benchmarks/gpu_rates.py --base H100-80GB --output mine.yaml   # and links
    python benchmarks/gpu_rates.py --base H100-80GB --device cpu --small                      # tries the script

`--base` is the known GPU from which peak rates and everything that cannot be measured here are taken: links that a
single process does not have, FP8 and grouped products without Transformer Engine, a scan without mamba_ssm. On several
nodes (torchrun on each), all ranks of a node use the links between nodes at once, as in training. Rates are medians;
the rate of a product is that of its forward and backward pass.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from gpu_parts import SMALL, Sizes, engine_attention, ssd
from gpu_timing import Machine, training_step
from torch import Tensor

from nemo_ext.architecture.cost import SCAN_CHUNK, attended_tokens
from nemo_ext.architecture.gpus import GPUS, Attention, Gpu, Link
from nemo_ext.architecture.step_time import BACKWARD_SCORES
from nemo_ext.job.progress import notice

SIZES = (256, 512, 1024, 2048, 4096)
TOKENS_PER_EXPERT = (128, 256, 512, 1024, 2048)
WIDE, EXPERTS = 8192, 16
MESSAGES = (1 << 12, 1 << 28)
"""Bytes that each rank sends: a message limited by latency, and a message limited by bandwidth."""
MISSING = "not measured: {name}: {why}"


class Rates:
    """Measured rates, and the names of those that could not be measured.

    Args:
        machine: device and number of rounds.
        small: whether to use toy sizes.
    """

    def __init__(self, machine: Machine, small: bool) -> None:
        self.machine, self.small = machine, small
        self.found: dict[str, Any] = {}

    def seconds(self, step: Callable[[], object]) -> float:
        """Median seconds of a step."""
        return self.machine.measure({"": step})[""].median / 1e3

    def run(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure a rate, or report why it cannot be."""
        try:
            self.found[name] = measure()
        except (ImportError, RuntimeError, NotImplementedError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notice(MISSING.format(name=name, why=reason))

    def matmul(self) -> dict[int, float]:
        """FLOP/s of BF16 products by their smallest size, which is the number of inputs."""
        wide, scale = (64, 64) if self.small else (WIDE, 1)
        rates = {}
        for size in SIZES:
            inputs = max(1, size // scale)
            x, weight = (self.machine.random(wide, inputs, grad=True) for _ in range(2))
            seconds = self.seconds(training_step(lambda t, w=weight: F.linear(t, w), x, [weight]))
            rates[size] = 3 * 2 * wide * wide * inputs / seconds
        return rates

    def fp8(self) -> dict[int, float]:
        """FLOP/s of Transformer Engine's Linear with current scaling, with the casts of inputs and weights."""
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        rates, scaling = {}, Float8CurrentScaling()
        for size in SIZES:
            linear = te.Linear(size, WIDE, bias=False, params_dtype=torch.bfloat16).cuda()
            x = self.machine.random(WIDE, size, grad=True)

            def forward(t: Tensor, linear: Any = linear) -> Tensor:
                with te.fp8_autocast(enabled=True, fp8_recipe=scaling):
                    return linear(t)

            seconds = self.seconds(training_step(forward, x, [linear.weight]))
            rates[size] = 3 * 2 * WIDE * WIDE * size / seconds
        return rates

    def grouped(self) -> dict[int, float]:
        """FLOP/s of the products of several experts by tokens of each, of the widths of Nemotron 3 Nano."""
        inputs, outputs = (32, 16) if self.small else (2688, 1856)
        if self.machine.device == "cpu":

            def experts(count: int) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
                weights = [self.machine.random(outputs, inputs, grad=True) for _ in range(EXPERTS)]

                def products(t: Tensor) -> Tensor:
                    return torch.cat([F.linear(x, w) for x, w in zip(t.split(count), weights, strict=True)])

                return products, weights
        else:
            import transformer_engine.pytorch as te

            def experts(count: int) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
                module = te.GroupedLinear(EXPERTS, inputs, outputs, bias=False, params_dtype=torch.bfloat16).cuda()
                return (lambda t: module(t, [count] * EXPERTS)), list(module.parameters())

        rates = {}
        for size in TOKENS_PER_EXPERT:
            count = max(1, size // (64 if self.small else 1))
            forward, weights = experts(count)
            x = self.machine.random(EXPERTS * count, inputs, grad=True)
            seconds = self.seconds(training_step(forward, x, weights))
            rates[size] = 3 * 2 * EXPERTS * count * inputs * outputs / seconds
        return rates

    def attention(self) -> Attention:
        """FLOP/s of causal attention in both passes, fused by cuDNN on a GPU."""
        length, heads, width = (64, 2, 16) if self.small else (WIDE, 32, 128)
        q, k, v = (self.machine.random(length, heads, width, grad=True) for _ in range(3))
        if self.machine.device == "cpu":

            def forward(t: Tensor) -> Tensor:
                queries, keys, values = (x.transpose(0, 1)[None] for x in (t, k, v))
                return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            forward = engine_attention("FUSED", heads, k, v, None, 1)
        flops = 4 * heads * width * attended_tokens(length) * length
        with torch.no_grad():
            alone = self.seconds(lambda: forward(q))
        both = self.seconds(training_step(forward, q, [] if self.machine.device == "cpu" else [k, v]))
        return Attention(forward=flops / alone, backward=BACKWARD_SCORES * flops / max(both - alone, 1e-9))

    def scan(self) -> float:
        """FLOP/s of Mamba-2's scan in both passes, by the cost model's FLOPs."""
        sizes = replace(SMALL if self.small else Sizes(), rounds=self.machine.rounds)
        (table,) = ssd(sizes, self.machine)
        _, timing, why = table.rows[0 if self.machine.device == "cpu" else 1]
        if timing is None:
            raise RuntimeError(why)
        inner = sizes.heads * sizes.head_dim
        within = 2 * attended_tokens(SCAN_CHUNK) * (sizes.groups * sizes.state + inner)
        flops = within + 4 * inner * sizes.state + 2 * inner * sizes.state / SCAN_CHUNK
        return 3 * flops * sizes.length / (timing.median / 1e3)

    def memory(self) -> float:
        """Bytes/s of a sum of two tensors, which reads two and writes one."""
        numbers = 1 << (12 if self.small else 28)
        x, y = (self.machine.random(numbers) for _ in range(2))
        z = torch.empty_like(x)
        return 3 * 2 * numbers / self.seconds(lambda: torch.add(x, y, out=z))

    def link(self, group: Any, known: Link) -> Link:
        """Rates of a group's links; every rank of the group has to call this."""
        ranks = dist.get_world_size(group)
        small, large = (bytes_ // (1 << 6) if self.small else bytes_ for bytes_ in MESSAGES)

        def gather(count: int) -> float:
            x = torch.zeros(count, dtype=torch.uint8, device=self.machine.device)
            parts = [torch.empty_like(x) for _ in range(ranks)]
            return self.seconds(lambda: dist.all_gather(parts, x, group=group))

        def exchange(count: int) -> float:
            x = torch.zeros(count // ranks * ranks, dtype=torch.uint8, device=self.machine.device)
            y = torch.empty_like(x)
            return self.seconds(lambda: dist.all_to_all_single(y, x, group=group))

        latency = gather(max(small, ranks))
        gathered = large * (ranks - 1) / max(gather(large) - latency, 1e-9)
        sent = large * (ranks - 1) / ranks / max(exchange(large) - latency, 1e-9)
        return replace(known, gather=gathered, all_to_all=sent, latency=latency)


def measured(base: Gpu, rates: Rates, local: int = 0) -> Gpu:
    """`base` with every rate that can be measured here; `local`: ranks of a node, 0 without a process group."""
    parts = {"matmul": rates.matmul, "grouped": rates.grouped, "attention": rates.attention}
    parts |= {"scan": rates.scan, "memory": rates.memory}
    if "fp8" in base.matmul:
        parts["fp8"] = rates.fp8
    for name, measure in parts.items():
        notice(f"measuring {name}")
        rates.run(name, measure)
    if local:
        nodes, rank = dist.get_world_size() // local, dist.get_rank()
        within = [dist.new_group(list(range(node * local, (node + 1) * local))) for node in range(nodes)]
        between = [dist.new_group(list(range(number, nodes * local, local))) for number in range(local)]
        if local > 1:
            rates.run("node", lambda: rates.link(within[rank // local], base.node))
        if nodes > 1:  # all ranks at once, as in training
            rates.run("between", lambda: rates.link(between[rank % local], base.between))
    found = dict(rates.found)
    products = {"bf16": found.pop("matmul", base.matmul["bf16"])}
    if "fp8" in base.matmul:
        products["fp8"] = found.pop("fp8", base.matmul["fp8"])
    grouped = {**base.grouped, "bf16": found.pop("grouped", base.grouped["bf16"])}
    known = rates.found.keys() - ({"grouped"} if "fp8" in base.grouped else set())
    known -= {"matmul"} if "fp8" in base.matmul and "fp8" not in rates.found else set()
    left = tuple(name for name in base.estimates if name.partition(".")[0] not in known)
    return replace(base, matmul=products, grouped=grouped, estimates=left, source=source(sorted(rates.found)), **found)


def source(names: list[str]) -> str:
    """Description of the measurement."""
    cpu = not torch.cuda.is_available()
    ranks = f", {dist.get_world_size()} ranks" if dist.is_initialized() else ""
    device = "CPU, toy figures" if cpu else torch.cuda.get_device_name()
    return f"benchmarks/gpu_rates.py on {device}{ranks}, torch {torch.__version__}: {', '.join(names)}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, choices=tuple(GPUS), help="known GPU with the same peak rates")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--output", type=Path, default=Path("gpu.yaml"), help="file to write (default: gpu.yaml)")
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    """Measure, and write the file from the first rank."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: try the script with --device cpu --small")
    torch.manual_seed(0)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if distributed:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    machine = Machine(arguments.device, 3 if arguments.small else 20)
    local = int(os.environ["LOCAL_WORLD_SIZE"]) if distributed else 0
    gpu = measured(GPUS[arguments.base], Rates(machine, arguments.small), local)
    if not distributed or not dist.get_rank():
        content = yaml.safe_dump({**asdict(gpu), "capability": list(gpu.capability), "estimates": list(gpu.estimates)})
        arguments.output.write_text(content)
        notice(f"wrote {arguments.output}; rates not measured are those of {arguments.base}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
