"""Ratios on one GPU, each measured within one run, as a Markdown table.

    python benchmarks/gpu.py --output gpu.md             # sizes of real models; estimated 20 GB of GPU memory
    python benchmarks/gpu.py --device cpu --small        # tries the script without a GPU; its times are meaningless

- fp8: a step (forward and backward) of linear layers in FP8 against BF16, with Transformer Engine if it is installed,
  otherwise with torch's scaled matrix products.
- ffn_fusion: FFNs in sequence against one wide FFN (FFN Fusion, arXiv:2503.18908) for few tokens.
- attention: Transformer Engine's kernels (fused by cuDNN, flash, unfused) against torch's: causal, window, packed.
- head: an output layer with an odd number of rows against padded ones.
- ssd: Mamba-2's scan in torch (nemo_ext/megatron/cpu) against the Triton kernels of mamba_ssm.

Sides alternate; times are medians of all rounds with quartiles, measured on a GPU by CUDA events. The table has the
reason for a side that cannot run.
"""

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_parts import PARTS, SMALL, Sizes
from gpu_timing import Machine, Table

from nemo_ext.job.progress import notice

PACKAGES = ("torch", "triton", "transformer-engine", "mamba-ssm")


def markdown(tables: list[Table], device: str) -> str:
    """Machine and all tables as Markdown."""
    name = platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    packages = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    lines = [f"On {name}; {packages}."]
    lines += ["Times in milliseconds: median (quartiles). Ratio: speed relative to the first row."]
    if device == "cpu":
        lines += ["", "On a CPU, to try the script: the figures do not apply to GPUs."]
    for table in tables:
        lines += ["", f"**{table.title}**", ""]
        lines += ["| | ms | ratio | |", "|:--|:--|:--|:--|"] if table.rows else []
        first = table.rows[0][1] if table.rows else None
        for side, timing, remark in table.rows:
            ratio = f"{first.median / timing.median:.2f}x" if first and timing else "-"
            spent = f"{timing.median:.3f} ({timing.low:.3f}-{timing.high:.3f})" if timing else "-"
            lines.append(f"| {side} | {spent} | {ratio} | {remark.replace('|', '/')} |")
        lines += ["", "\n".join(f"- {remark}" for remark in table.remarks)] if table.remarks else []
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="file for the tables (default: gpu.md)")
    return parser.parse_args(arguments)


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def main(arguments: argparse.Namespace) -> None:
    """Run the parts in sequence; the file has the finished ones."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: try the script with --device cpu --small")
    torch.manual_seed(0)
    sizes = SMALL if arguments.small else Sizes()
    machine = Machine(arguments.device, sizes.rounds)
    tables: list[Table] = []
    for part in arguments.parts:
        notice(f"measuring {part}")
        try:
            for table in PARTS[part](sizes, machine):
                tables.append(table)
                write(arguments.output, markdown(tables, arguments.device))
        except Exception as error:  # a broken engine, or results that disagree
            reason = " ".join(str(error).split())[:300]
            tables.append(Table(part, [("all", None, f"cannot run: {type(error).__name__}: {reason}")]))
        write(arguments.output, markdown(tables, arguments.device))
    print(markdown(tables, arguments.device), end="")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
