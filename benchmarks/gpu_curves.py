"""Losses of every family's smallest model on a GPU, by precision and back end, beside float32 on the CPU.

    python benchmarks/gpu_curves.py runs/curves                 # several at a time; the table grows as they end
    python benchmarks/gpu_curves.py runs/curves --only "cpu fp32"      # the references, on any machine

The quickstart's recipe and text, with weights drawn on the CPU: all runs of a model start from the same ones and see
the same batches. Runs that are done are not run again.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_runs import prepared, run

from nemo_ext.job.run_directory import METRICS, read_metrics

MODELS = ("nemotron3_nano", "domyn_small", "llama_nemotron", "olmo1", "olmo3")
CPU = "cpu fp32"
SIDES: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=bf16",),
    "bf16 local": ("precision=bf16", "model.backend=local"),
    "fp8_current": ("precision=fp8_current",),
    "fp8_delayed": ("precision=fp8_delayed",),
    "fp8_current local": ("precision=fp8_current", "model.backend=local"),
    CPU: ("precision=fp32", "model.backend=local"),
}
COMMON = ("megatron.use_cpu_initialization=true", "megatron.save_interval=1000")


def folder(out: Path, model: str, side: str) -> Path:
    return out / f"{model}_{side.replace(' ', '_')}"


def curve(out: Path, model: str, side: str) -> tuple[list[float], list[float]]:
    """Losses of training and of validation."""
    found = read_metrics(folder(out, model, side) / METRICS)
    return [line["loss"] for line in found if "loss" in line], [
        line["val_loss"] for line in found if "val_loss" in line
    ]


def table(out: Path, failed: dict[tuple[str, str], str]) -> str:
    """By model and side: losses of the first steps, of the last ten and of validation, and how far from the CPU's."""
    lines = [
        "| | | loss of step 1 | mean of the last 10 | validation | beside the CPU's |",
        "|:--|:--|--:|--:|--:|--:|",
    ]
    for model in MODELS:
        reference = curve(out, model, CPU)[1]
        for side in SIDES:
            steps, valid = curve(out, model, side)
            if (model, side) in failed or not steps or not valid:
                lines.append(f"| {model} | {side} | {failed.get((model, side), 'not run')} | | | |")
                continue
            off = f"{valid[-1] / reference[-1] - 1:+.2%}" if reference and side != CPU else ""
            last = sum(steps[-10:]) / len(steps[-10:])
            lines.append(f"| {model} | {side} | {steps[0]:.4f} | {last:.4f} | {valid[-1]:.4f} | {off} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where runs and the table (curves.md) go")
    parser.add_argument("--only", nargs="+", choices=tuple(SIDES), default=list(SIDES), help="these sides alone")
    parser.add_argument("--together", type=int, default=8, help="runs at a time (default 8)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a run (default 300)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[tuple[str, str], str] = {}
    cases = [(model, side) for side in arguments.only for model in MODELS]
    todo = [case for case in cases if not (folder(out, *case) / "done").exists()]
    data = f"data_root={out / 'data'}"
    configs = {
        case: prepared(folder(out, *case), [f"model={case[0]}_tiny", data, *COMMON, *SIDES[case[1]]]) for case in todo
    }

    def one(case: tuple[str, str]) -> None:
        if said := run(configs[case], arguments.limit, device=case[1] != CPU):
            failed[case] = said
        else:
            (folder(out, *case) / "done").touch()
        (out / "curves.md").write_text(table(out, dict(failed)))

    with ThreadPoolExecutor(arguments.together) as pool:
        list(pool.map(one, todo))
    (out / "curves.md").write_text(table(out, dict(failed)))
    print((out / "curves.md").read_text(), end="")


if __name__ == "__main__":
    main()
