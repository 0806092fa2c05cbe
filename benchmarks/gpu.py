"""Ratios on one GPU, each of things measured in one run, as a Markdown table.

    python benchmarks/gpu.py --output gpu.md             # sizes of real models; 20 GB of GPU memory by calculation
    python benchmarks/gpu.py --device cpu --small        # tries the script where there is no GPU; its times say nothing

- fp8: a step (forward and backward) of linear maps in FP8 against BF16, with Transformer Engine where it is
  installed, else with torch's scaled matrix products.
- ffn_fusion: FFNs one after the other against one wide FFN (FFN Fusion, arXiv:2503.18908) for few tokens.
- attention: Transformer Engine's kernels (fused by cuDNN, flash, unfused) against torch's: causal, window, packed.
- head: an output layer with an odd number of rows against padded ones.
- ssd: Mamba-2's scan in torch (nemo_ext/megatron/cpu) against the Triton kernels of mamba_ssm.

Sides take turns; a time is the median of all rounds with the quartiles beside it, on a GPU by CUDA events. A side that
cannot run here says why in the table.
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
    """All tables, below what they were measured on."""
    name = platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    packages = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    lines = [f"On {name}; {packages}."]
    lines += ["Times in milliseconds: median (quartiles). Ratio: how many times as fast as the first row."]
    if device == "cpu":
        lines += ["", "On a CPU, to try the script: no figure here says anything about a GPU."]
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
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="where the tables go (default gpu.md)")
    return parser.parse_args(arguments)


def write(path: Path, text: str) -> None:
    """A whole file or none."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def main(arguments: argparse.Namespace) -> None:
    """Runs the parts, one after the other; the file has those that are done."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: try the script with --device cpu --small")
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
        except Exception as error:  # of an installed engine that is broken, or results that disagree
            reason = " ".join(str(error).split())[:300]
            tables.append(Table(part, [("all", None, f"cannot run: {type(error).__name__}: {reason}")]))
        write(arguments.output, markdown(tables, arguments.device))
    print(markdown(tables, arguments.device), end="")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
