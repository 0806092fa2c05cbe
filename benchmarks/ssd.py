"""Speed and memory of the torch Mamba-2 kernels on a CPU, forward plus backward, all sides in one run.

    python benchmarks/ssd.py --json ssd.json

- The whole mixer (projections, convolution, scan, gated norm) against transformers' Mamba2Mixer with equal
  weights, after a check that outputs and all gradients agree.
- The scan alone against plain matrix products with the same number of operations, and against transformers' scan
  if that is a function (5.x).
- Seconds and memory by length.

The version of transformers is reported: 4.x materialises [chunk, chunk, heads, state], 5.x does not, so they differ by
an order of magnitude. Sides alternate; medians are reported, in the JSON also the best. The load of the machine, which
distorts both, is reported as well.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nemo_ext.megatron.cpu import mamba_scan
from nemo_ext.megatron.cpu.mamba_modules import mamba_split_conv1d_scan_combined
from nemo_ext.megatron.cpu.mamba_norm import rms_norm_gated
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan

AGREEMENT = 1e-4
"""Largest difference allowed between the two mixers, relative to the largest value."""


@dataclass(frozen=True)
class Sizes:
    """A Mamba-2 layer; the defaults are those of the published comparison."""

    heads: int = 16
    head_dim: int = 64
    state: int = 64
    groups: int = 1

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def hidden(self) -> int:
        return self.inner // 2


Step = Callable[[], None]


def theirs(sizes: Sizes, chunk_size: int) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """transformers' mixer in training mode and its pure torch forward."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        hidden_size=sizes.hidden,
        state_size=sizes.state,
        expand=2,
        n_groups=sizes.groups,
        chunk_size=chunk_size,
        num_hidden_layers=1,
        use_bias=False,
        time_step_limit=(0.0, float("inf")),
    )
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, 0).train()
    with torch.no_grad():
        # In 4.x the surrounding model initialises these; the distributions are Mamba-2's.
        mixer.A_log.copy_(torch.linspace(1, 16, sizes.heads).log())
        dt = torch.logspace(-3, -1, sizes.heads)
        mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
    return mixer, getattr(mixer, "torch_forward", mixer)


def ours(mixer: Any, sizes: Sizes, chunk_size: int) -> Callable[[Tensor], Tensor]:
    """The same mixer with our kernels and the weights of `mixer`."""

    def forward(x: Tensor) -> Tensor:
        out = mamba_split_conv1d_scan_combined(
            mixer.in_proj(x),
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            mixer.dt_bias,
            -torch.exp(mixer.A_log),
            mixer.D,
            chunk_size,
            headdim=sizes.head_dim,
            ngroups=sizes.groups,
        )
        assert isinstance(out, Tensor)
        # As in Megatron: the gate is in the scan, not in the norm after it.
        group_size = sizes.inner // sizes.groups
        normed = rms_norm_gated(out, mixer.norm.weight, eps=mixer.norm.variance_epsilon, group_size=group_size)
        return mixer.out_proj(normed)

    return forward


def training_step(forward: Callable[[Tensor], Tensor], x: Tensor, module: Any) -> Step:
    """One forward and backward of a fixed projection of the output."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        module.zero_grad()
        x.grad = None
        forward(x).backward(weight)

    return step


def largest_difference(
    one: Step, other: Step, forwards: list[Callable[[Tensor], Tensor]], x: Tensor, module: Any
) -> float:
    """Largest difference of outputs and of all gradients, each relative to its largest value."""
    sides = []
    for step, forward in zip((one, other), forwards, strict=True):
        step()
        assert x.grad is not None
        gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        with torch.no_grad():
            sides.append([forward(x), x.grad.clone(), *gradients])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(sides[0], sides[1], strict=True))


def scan_inputs(sizes: Sizes, length: int) -> dict[str, Tensor]:
    """Leaves for a scan with gate and skip."""
    torch.manual_seed(0)
    x_shape = (1, length, sizes.heads, sizes.head_dim)
    grouped = (1, length, sizes.groups, sizes.state)
    inputs = {
        "x": torch.randn(x_shape),
        "dt": torch.rand(x_shape[:3]) * 0.1,
        "A": -torch.linspace(1, 16, sizes.heads),
        "B": torch.randn(grouped),
        "C": torch.randn(grouped),
        "D": torch.ones(sizes.heads),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def scan_step(scan: Callable[..., Any], inputs: dict[str, Tensor], chunk_size: int) -> Step:
    """One forward and backward of a scan function."""
    weight = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1))
    x, dt, A, B, C, D = (inputs[name] for name in ("x", "dt", "A", "B", "C", "D"))

    def step() -> None:
        for tensor in inputs.values():
            tensor.grad = None
        scan(x, dt, A, B, C, chunk_size=chunk_size, D=D).backward(weight)

    return step


def count_operations(step: Step) -> int:
    """Number of floating-point operations of the matrix products in a step."""
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return int(counter.get_total_flops())


def matmul_step(operations: int) -> Step:
    """Large square matrix products with this total number of operations (rounded to whole products)."""
    size = 1024
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    count = max(1, round(operations / (2 * size**3)))

    def step() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return step


def take_turns(steps: dict[str, Step], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median and best seconds of each step; every round runs each once, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return medians, {name: min(values) for name, values in seconds.items()}


def saved_bytes(function: Callable[[], object]) -> int:
    """Bytes of the distinct storages saved by autograd for the backward pass."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = function()
    del kept
    return sum(storages.values())


def print_peak(side: str, sizes: Sizes, length: int, chunk_size: int) -> None:
    """Print the bytes that one training step of a mixer adds to the peak of this process."""
    mixer, forward = theirs(sizes, chunk_size)
    if side == "ours":
        forward = ours(mixer, sizes, chunk_size)
    # Warm up on a short sequence, so that libraries and their threads are not counted.
    training_step(forward, torch.randn(1, 64, sizes.hidden, requires_grad=True), mixer)()
    step = training_step(forward, torch.randn(1, length, sizes.hidden, requires_grad=True), mixer)
    before = psutil.Process().memory_info().rss
    step()
    print(peak_resident_bytes() - before)


def peak_resident_bytes() -> int:
    """Peak memory of this process (Linux; `ru_maxrss` would include the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: peak memory is measured on Linux only")


def peak_bytes(side: str, length: int, chunk_size: int, threads: int) -> int:
    """Run `print_peak` in a separate process."""
    command = [
        sys.executable,
        __file__,
        "--peak-of",
        side,
        "--length",
        str(length),
        "--chunks",
        str(chunk_size),
    ]
    done = subprocess.run(
        [*command, "--threads", str(threads)], check=True, capture_output=True, text=True, env=os.environ
    )
    return int(done.stdout.split()[-1])


def compare_mixers(sizes: Sizes, length: int, chunk_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both mixers at one chunk size."""
    mixer, their_forward = theirs(sizes, chunk_size)
    our_forward = ours(mixer, sizes, chunk_size)
    x = torch.randn(1, length, sizes.hidden, requires_grad=True)
    forwards = [our_forward, their_forward]
    steps = [training_step(forward, x, mixer) for forward in forwards]
    difference = largest_difference(steps[0], steps[1], forwards, x, mixer)
    if difference > AGREEMENT:
        raise SystemExit(f"the mixers differ by {difference:.1e} of the largest value, more than {AGREEMENT:.0e}")
    projected = int(mixer.in_proj.weight.shape[0])
    projections = 3 * 2 * length * sizes.hidden * (projected + sizes.inner)
    seconds, best = take_turns(
        {"ours": steps[0], "transformers": steps[1], "projections": matmul_step(projections)},
        arguments.repeats,
    )
    return {
        "chunk_size": chunk_size,
        "seconds": seconds,
        "best_seconds": best,
        "speedup": seconds["transformers"] / seconds["ours"],
        "largest_difference": difference,
        "saved_bytes": {
            "ours": saved_bytes(lambda: our_forward(x)),
            "transformers": saved_bytes(lambda: their_forward(x)),
        },
        "peak_bytes": {
            side: peak_bytes(side, length, chunk_size, arguments.threads) for side in ("ours", "transformers")
        },
    }


def compare_scans(sizes: Sizes, length: int, chunk_size: int, repeats: int) -> dict[str, Any]:
    """Compare the scan alone with matrix products, and with transformers' scan if it can be called."""
    inputs = scan_inputs(sizes, length)
    step = scan_step(ssd_chunk_scan, inputs, chunk_size)
    operations = count_operations(step)
    steps = {"ours": step, "matmul": matmul_step(operations)}
    try:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    except ImportError:
        pass
    else:
        steps["transformers"] = scan_step(mamba2_chunk_scan, inputs, chunk_size)
    seconds, best = take_turns(steps, repeats)
    return {"chunk_size": chunk_size, "operations": operations, "seconds": seconds, "best_seconds": best}


def by_length(sizes: Sizes, lengths: list[int], chunk_size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Our mixer at several lengths."""
    mixer, _ = theirs(sizes, chunk_size)
    forward = ours(mixer, sizes, chunk_size)
    rows = []
    for length in lengths:
        x = torch.randn(1, length, sizes.hidden, requires_grad=True)
        scan = scan_step(ssd_chunk_scan, scan_inputs(sizes, length), chunk_size)
        steps = {"mixer": training_step(forward, x, mixer), "scan": scan}
        seconds, best = take_turns(steps, arguments.repeats)
        rows.append(
            {
                "length": length,
                "seconds": seconds,
                "best_seconds": best,
                "saved_bytes": saved_bytes(partial(forward, x)),
                "peak_bytes": peak_bytes("ours", length, chunk_size, arguments.threads),
            }
        )
    return rows


def by_block(sizes: Sizes, length: int, repeats: int) -> list[dict[str, Any]]:
    """The scan with other block lengths than the default."""
    rows = []
    built_in = mamba_scan.BLOCK_LENGTH
    for block in (32, 64, 128):
        mamba_scan.BLOCK_LENGTH = block
        step = scan_step(ssd_chunk_scan, scan_inputs(sizes, length), block)
        seconds, best = take_turns({"scan": step}, repeats)
        rows.append({"block": block, "seconds": seconds["scan"], "best_seconds": best["scan"]})
    mamba_scan.BLOCK_LENGTH = built_in
    return rows


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for row in (columns, *rows):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_report(result: dict[str, Any]) -> None:
    """Print the tables; memory in MB."""

    def megabytes(count: float) -> str:
        return f"{count / 1e6:.0f}"

    print(result["settings"])
    print_table(
        "Whole mixer, forward + backward",
        ["chunk", "ours s", "transformers s", "speedup", "projections s", "differ by", "saved MB", "peak MB"],
        [
            [
                str(row["chunk_size"]),
                f"{row['seconds']['ours']:.3f}",
                f"{row['seconds']['transformers']:.3f}",
                f"{row['speedup']:.1f}x",
                f"{row['seconds']['projections']:.3f}",
                f"{row['largest_difference']:.0e}",
                " / ".join(megabytes(row["saved_bytes"][side]) for side in ("ours", "transformers")),
                " / ".join(megabytes(row["peak_bytes"][side]) for side in ("ours", "transformers")),
            ]
            for row in result["mixers"]
        ],
    )
    print_table(
        "Scan alone, forward + backward",
        ["chunk", "GFLOP", "ours s", "matmul s", "ours/matmul", "transformers s", "speedup"],
        [
            [
                str(row["chunk_size"]),
                f"{row['operations'] / 1e9:.2f}",
                f"{row['seconds']['ours']:.4f}",
                f"{row['seconds']['matmul']:.4f}",
                f"{row['seconds']['ours'] / row['seconds']['matmul']:.2f}x",
                f"{other:.4f}" if (other := row["seconds"].get("transformers")) else "no function",
                f"{other / row['seconds']['ours']:.1f}x" if other else "-",
            ]
            for row in result["scans"]
        ],
    )
    print_table(
        "By length",
        ["length", "mixer s", "scan s", "scan us/token", "mixer saved MB", "mixer peak MB"],
        [
            [
                str(row["length"]),
                f"{row['seconds']['mixer']:.3f}",
                f"{row['seconds']['scan']:.4f}",
                f"{row['seconds']['scan'] / row['length'] * 1e6:.1f}",
                megabytes(row["saved_bytes"]),
                megabytes(row["peak_bytes"]),
            ]
            for row in result["lengths"]
        ],
    )
    if "blocks" in result:
        print_table(
            "Scan by block length",
            ["block", "scan s"],
            [[str(row["block"]), f"{row['seconds']:.4f}"] for row in result["blocks"]],
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="tokens for the comparisons (default 2048)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256], help="chunk sizes compared")
    parser.add_argument("--heads", type=int, default=Sizes.heads)
    parser.add_argument("--state", type=int, default=Sizes.state)
    parser.add_argument("--groups", type=int, default=Sizes.groups)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds; medians are reported")
    parser.add_argument("--blocks", action="store_true", help="also time the scan with blocks of 32, 64 and 128")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--peak-of", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    """Run and print all comparisons."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    sizes = Sizes(heads=arguments.heads, state=arguments.state, groups=arguments.groups)
    if arguments.peak_of:
        print_peak(arguments.peak_of, sizes, arguments.length, arguments.chunks[0])
        return
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {
        "settings": {
            **asdict(sizes),
            "length": arguments.length,
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "mixers": [compare_mixers(sizes, arguments.length, chunk, arguments) for chunk in arguments.chunks],
        "scans": [compare_scans(sizes, arguments.length, chunk, arguments.repeats) for chunk in arguments.chunks],
        "lengths": by_length(sizes, arguments.lengths, arguments.chunks[0], arguments),
    }
    if arguments.blocks:
        result["blocks"] = by_block(sizes, arguments.length, arguments.repeats)
    result["settings"]["load"] = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    print_report(result)
    if arguments.json:
        temporary = arguments.json.with_name(arguments.json.name + ".part")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(arguments.json)


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
