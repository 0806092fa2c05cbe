"""Compare small jobs on real tensors and real processes with their rehearsals, rank by rank.

    python tests/rehearsal/truth.py --table            the table of docs/rehearsal_accuracy.md
    python tests/rehearsal/truth.py 'olmo3, PP2' --json FILE

Each rank of the real job runs Megatron's `pretrain()` over gloo; its second step is measured by a dispatch mode, by
torch's profiler and by torch's allocator.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_server import preload

from nemo_ext.architecture.layout import Layout
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.job.ranks import reserve_port
from nemo_ext.job.report import markdown_table
from nemo_ext.megatron.arguments import world_size
from nemo_ext.megatron.rank import end_with_parent, leave

BASE = (
    "recipe=nemotron3_nano/quickstart",
    "data=mock",
    "precision=bf16",
    "megatron.seq_length=256",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=24",
    "megatron.num_workers=0",
    "megatron.eval_iters=0",
    "megatron.moe_router_force_load_balancing=true",
    "memory_profile=null",
)
MODELS = {
    "nemotron3_nano": ("model=nemotron3_nano_tiny",),
    "domyn_small": ("model=domyn_small_tiny",),
    "llama_nemotron": ("model=llama_nemotron_tiny",),
    "olmo3": ("model=olmo3_tiny",),
}
TWO = "launcher.nproc_per_node=2"
LAYOUTS = {
    "TP2 SP": (TWO, "megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"),
    "PP2": (TWO, "megatron.pipeline_model_parallel_size=2"),
    "DP2": (TWO, "megatron.use_distributed_optimizer=true"),
    "CP2": (TWO, "megatron.context_parallel_size=2", "model.pattern=MEM-E"),  # without attention, which a GPU needs
    "EP2": (TWO, "megatron.expert_model_parallel_size=2", "megatron.moe_token_dispatcher_type=alltoall"),
    "full recompute": (
        "megatron.recompute_granularity=full",
        "megatron.recompute_method=uniform",
        "megatron.recompute_num_layers=1",
    ),
    "selective": ("megatron.recompute_granularity=selective", "megatron.recompute_modules=[core_attn,mlp,moe]"),
}
CASES = {
    f"{model}, {layout}": (*MODELS[model], *LAYOUTS[layout])
    for model in MODELS
    for layout in LAYOUTS
    if model == "nemotron3_nano" or layout in ("TP2 SP", "PP2", "DP2")
}


GLOO = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter_base": "all_reduce",  # gloo does not have it
    "reduce_scatter_tensor_coalesced": "all_reduce",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "alltoall_base": "all_to_all",
    "send": "send",
    "recv": "recv",
}
"""Names of the operations in torch's profiler."""


class Collectives(TorchDispatchMode):
    """Counts real collectives by group and operation: calls, and bytes of the larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            group = next(
                leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            )
            key = (
                torch.distributed.ProcessGroup.unbox(group).group_desc,
                func._schema.name.removeprefix("c10d::").strip("_"),
            )
            self.calls[key] += 1
            self.bytes[key] += max((leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and key[1] not in ("send", "recv"):
            # So that this thread is the last to hold the tensors: the profiler does not see what gloo's threads free.
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.ScriptObject) and "Work" in str(leaf._type()):
                    torch.distributed.Work.unbox(leaf).wait()
            time.sleep(1e-3)
        return out

    def table(self) -> list[list[Any]]:
        return [[*key, self.calls[key], self.bytes[key]] for key in sorted(self.calls)]


def even(logits: torch.Tensor) -> torch.Tensor:
    """Logits that balance the experts exactly; gradients pass, as with Megatron's random logits."""
    from megatron.core.transformer.moe.moe_utils import RandomSTE
    from megatron.training import get_args

    out = RandomSTE.apply(logits)
    *_, experts = logits.shape
    top = get_args().moe_router_topk
    place = (torch.arange(logits.numel() // experts)[:, None] * top + torch.arange(top)) % experts
    with torch.no_grad():
        out.fill_(-4.0).view(-1, experts).scatter_(1, place, 4.0)
    return out


def real(config_path: str, out: Path) -> None:
    """Run one rank of the real job: measures its second step, then exits."""
    from nemo_ext.megatron import arguments, rank

    arguments.LOCAL_BACKEND.pop("no_bias_swiglu_fusion")  # as in a rehearsal: saves what the GPU kernel saves
    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def prepare() -> None:
        from megatron.core.transformer.moe import router, token_dispatcher
        from megatron.training import training

        router.apply_random_logits = even
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        synchronize = dispatcher._maybe_dtoh_and_synchronize

        def on_host(self: Any, *given: Any) -> Any:
            # Megatron brings splits to the host only from a GPU; torch takes no tensors for them.
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(splits := getattr(self, name), torch.Tensor):
                    setattr(self, name, splits.tolist())
            return synchronize(self, *given)

        dispatcher._maybe_dtoh_and_synchronize = on_host
        seen.start()
        step, log, count = training.train_step, training.training_log, [0]
        found: dict[str, Any] = {}

        def stepped(forward: Any, data: Any, models: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == 1:
                return step(forward, data, models, optimizer, *args, **kwargs)
            with Collectives() as counted, record_function("the step"):
                result = step(forward, data, models, optimizer, *args, **kwargs)
            seen.stop()
            found.update(held(models, optimizer), collectives=counted.table(), **profiled(seen))
            return result

        def logged(*args: Any, **kwargs: Any) -> Any:
            with Collectives() as counted:
                result = log(*args, **kwargs)
            if count[0] == 2:
                found["log"] = counted.table()
                out.write_text(json.dumps(found))
                torch.distributed.barrier()
                leave(0)
            return result

        training.train_step, training.training_log = stepped, logged

    rank.run(config_path, prepare)


def held(models: Any, optimizer: Any) -> dict[str, Any]:
    """Number of parameters, and bytes of the gradient buffers and of the optimizer."""
    parameters = [each for model in models for each in model.parameters()]
    buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    weights = {each.untyped_storage().data_ptr() for each in parameters}
    inner = [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    states = [
        leaf for each in inner for leaf in tree_leaves(list(each.state.values())) if isinstance(leaf, torch.Tensor)
    ]
    masters = [each for one in inner for group in one.param_groups for each in group["params"]]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in (*states, *masters)
        if each.untyped_storage().data_ptr() not in weights
    }
    return {
        "parameters": sum(each.numel() for each in parameters),
        "gradients": sum(each.grad_data.untyped_storage().nbytes() for each in buffers),
        "optimizer": sum(storages.values()),
    }


def profiled(seen: profile) -> dict[str, Any]:
    """Peak bytes of the step by torch's allocator, and its gloo calls by torch's profiler.

    Memory of gloo itself is excluded, as are NCCL's buffers in a rehearsal.
    """
    events = list(_every(seen.profiler.kineto_results.experimental_event_tree()))
    span = next(event for event in events if event.name == "the step")
    begin, end = span.start_time_ns, span.end_time_ns
    sizes: dict[int, int] = {}
    live = highest = 0
    for event in sorted(events, key=lambda each: each.start_time_ns):
        if event.name != "[memory]":
            continue
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0 and (event.start_tid != span.start_tid or _within_gloo(event)):
            continue
        if size > 0:
            live += size - sizes.get(place, 0)  # the address may have been freed by another thread
            sizes[place] = size
        else:
            live -= sizes.pop(place, 0)
        if begin <= event.start_time_ns <= end:
            highest = max(highest, live)
    calls = Counter(
        event.name.removeprefix("gloo:")
        for event in events
        if event.name.startswith("gloo:") and begin <= event.start_time_ns <= end
    )
    return {"peak": highest, "profiled": dict(calls)}


def _every(events: Any) -> Any:
    for event in events:
        yield event
        yield from _every(event.children)


def _within_gloo(event: Any) -> bool:
    while event is not None:
        if event.name.startswith(("c10d::", "gloo:")):
            return True
        event = event.parent
    return False


def fake(request: Mapping[str, Any], out: Path) -> None:
    """Rehearse one rank."""
    from nemo_ext.rehearsal.rank import rehearse

    made = rehearse(**request)
    made.pop("curve")
    out.write_text(json.dumps(made))
    leave(0)


def forked(works: Sequence[tuple[Callable[[], None], Mapping[str, str], Path]]) -> None:
    """Run functions in parallel child processes; raises RuntimeError with the log of the first that fails."""
    children = {}
    for work, environment, log in works:
        child = os.fork()
        if child:
            children[child] = log
            continue
        end_with_parent(signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= environment
        try:
            work()
        except BaseException:
            traceback.print_exc()
        leave(1)
    failed = None
    while children:
        child, status = os.wait()
        log = children.pop(child)
        if status and failed is None:
            failed = log
            for other in children:
                os.kill(other, signal.SIGKILL)
    if failed is not None:
        raise RuntimeError(f"{failed}:\n{failed.read_text(errors='replace')[-3000:]}")


def compared(words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Measurements of each rank (`real`); rehearsals of its stage with GPU kernels (`said`) and without (`here`)."""
    from nemo_ext.rehearsal.ranks import _micro_batches
    from nemo_ext.rehearsal.settings import rehearsed

    folder.mkdir(parents=True, exist_ok=True)
    config = compose("train", [*BASE, *words, f"run_dir={folder / 'run'}"])
    path = run_directory.write_config(folder / "run", config)
    world = world_size(config)
    held = reserve_port()
    base = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held.getsockname()[1]),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    works: list[Any] = [
        (
            lambda rank=rank: real(str(path), folder / f"real{rank}.json"),
            base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            folder / f"real{rank}.log",
        )
        for rank in range(world)
    ]
    with held:
        forked(works)
    changed, _ = rehearsed(compose("rehearse", [*BASE, *words, f"run_dir={folder / 'run'}"]))
    layout = Layout.from_config(changed, world_size=world)
    stages = layout.pipeline_parallel
    works = []
    for stage in range(stages):
        for name, kernels in (("said", True), ("here", False)):
            asked = {"config": changed, "rank": stage * world // stages, "world": world, "kernels": kernels}
            asked["micro_batches"] = _micro_batches(layout, stage)
            works.append(
                (
                    lambda asked=asked, out=folder / f"{name}{stage}.json": fake(asked, out),
                    {},
                    folder / f"{name}{stage}.log",
                )
            )
    forked(works)

    def read(name: str) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return made

    return [
        {
            "rank": rank,
            "real": read(f"real{rank}"),
            "said": read(f"said{rank * stages // world}"),
            "here": read(f"here{rank * stages // world}"),
        }
        for rank in range(world)
    ]


def differences(rank: Mapping[str, Any]) -> list[str]:
    """Differences between a rehearsal and the real rank, as texts."""
    texts, real = [], rank["real"]
    counted = {(group, operation): [count, size] for group, operation, count, size in real["collectives"]}
    calls: Counter[str] = Counter()
    for (_, operation), (count, _) in counted.items():
        calls[GLOO[operation]] += count
    if calls != real["profiled"]:
        texts.append(f"counted {dict(calls)}, by torch's profiler {real['profiled']}")
    for name in ("said", "here"):
        record = rank[name]
        sent = {(each["group"], each["operation"]): [each["count"], each["bytes"]] for each in record["collectives"]}
        for key in sorted(counted.keys() | sent.keys()):
            if counted.get(key) != sent.get(key):
                texts.append(f"{name}: {key}: {counted.get(key)} and not {sent.get(key)}")
        pairs = [("parameters", record["parameters"]), ("gradients", record["peak"].get("gradients", 0))]
        if record["rank"] == rank["rank"]:  # the optimizer shards of other ranks differ by the padding of buffers
            pairs.append(("optimizer", record["peak"].get("optimizer", 0)))
        texts += [f"{name}: {key}: {real[key]} and not {value}" for key, value in pairs if real[key] != value]
    return texts


def ratios(rank: Mapping[str, Any]) -> tuple[float, float]:
    """Ratio of the rehearsed to the real peak, with and without weights, gradients and optimizer states."""
    real, here = rank["real"], rank["here"]
    held = sum(here["peak"].get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    return here["peak_bytes"] / real["peak"], (here["peak_bytes"] - held) / (real["peak"] - held)


def rows(name: str, ranks: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Rows of the table for one case."""
    for rank in ranks:
        real, (peak, rest) = rank["real"], rank["ratios"]
        calls, sent = (sum(each[place] for each in real["collectives"]) for place in (2, 3))
        yield [
            name if not rank["rank"] else "",
            *(f"{number:,}" for number in (rank["rank"], real["parameters"], real["gradients"], real["optimizer"])),
            *(f"{number:,}" for number in (calls, sent)),
            "; ".join(rank["differences"]) or "all",
            f"{peak:.3f}",
            f"{rest:.3f}",
        ]


HELD = ("parameters", "gradients, bytes", "optimizer, bytes")
HEADING = ("model, layout", "rank", *HELD, "calls", "bytes sent", "equal", "peak", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of: {'; '.join(CASES)} (default: all)")
    parser.add_argument("--table", action="store_true", help="print the table of results")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"unknown: {', '.join(unknown)}")
    preload()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(arguments.cases or CASES):
            print(name, file=sys.stderr)
            results[name] = compared(CASES[name], Path(folder) / str(number))
            for rank in results[name]:
                rank["differences"], rank["ratios"] = differences(rank), ratios(rank)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.table:
        print(markdown_table(HEADING, [row for name, ranks in results.items() for row in rows(name, ranks)]))


if __name__ == "__main__":
    main()
