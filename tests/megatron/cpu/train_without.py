"""Trains two steps once for every target of the patch table, without that target; prints JSON: target -> error or null.

Run as a script: importing Megatron takes seconds, so it happens once and every trial is a forked child.
"""

import json
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.job.ranks import reserve_port
from nemo_ext.megatron import trainer
from nemo_ext.megatron.arguments import command_line, parse_arguments
from nemo_ext.megatron.cpu import mamba_modules, patches, runtime
from nemo_ext.megatron.rank import leave

OVERRIDES = (
    "data=mock",
    "train.tokens=256",
    "megatron.seq_length=32",
    "megatron.micro_batch_size=2",
    "megatron.global_batch_size=4",
    "megatron.save_interval=1",
    "megatron.eval_interval=1",
    "megatron.eval_iters=1",
    "megatron.num_workers=0",
    "megatron.use_distributed_optimizer=true",
    "megatron.moe_token_dispatcher_type=alltoall",
)


def trial(target: str, config: dict[str, Any]) -> str | None:
    """Trains in a child process without `target`; the child's error, or None if it did not need the target."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        path = run_directory.write_config(run_dir, config | {"run_dir": folder})
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with (run_dir / "out").open("w") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                    patches.apply(without=[target])
                    runtime.enable = lambda: []  # what the trainer calls: everything is in place but this
                    check_random_states()
                    check_mamba_step()
                    check_parallel_load()
                    if target == patches.WORKER:  # which takes seconds to start
                        check_checkpoint_worker()
                    tensor_parallel = config | {"megatron": config["megatron"] | {"tensor_model_parallel_size": 2}}
                    parse_arguments(command_line(tensor_parallel), world_size=2)
                    trainer.main(str(path))
                code = 0
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                (run_dir / "error").write_text(f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")
            finally:
                leave(code)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return None
        error_file = run_dir / "error"
        return error_file.read_text() if error_file.exists() else f"ended with status {status}"


def check_random_states() -> None:
    """Checks what a missing random-state patch breaks silently: separate states, and restoring the default state."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    states = tracker.get_states()
    assert not torch.equal(states["one"], states["two"]), "two seeds gave one random state"
    before = torch.get_rng_state()
    with tracker.fork("one"):
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state()), "a forked random state was not put back"
    assert not torch.equal(states["one"], tracker.get_states()["one"]), "a forked random state did not advance"


def check_mamba_step() -> None:
    """Calls the functions of the mixer for one token, which generation needs and training does not."""
    from megatron.core.ssm import mamba_mixer

    head, state = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 1, 8)
    mamba_mixer.causal_conv1d_update(torch.ones(1, 1, 8), torch.ones(1, 8, 4), torch.ones(8, 4), None, "silu", None)
    mamba_mixer.selective_state_update(torch.ones(1, 2, 4, 8), head, head, -torch.ones(2, 4, 8), state, state)


def check_parallel_load() -> None:
    """Loads a tensor that another data-parallel rank reads, as `ckpt_fully_parallel_load` does."""
    from megatron.core.dist_checkpointing.exchange_utils import _get_empty_tensor_for_exchange
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensor = ShardedTensor.from_rank_offsets("weight", torch.ones(2), replica_id=1)
    tensor.init_data("cpu")
    _get_empty_tensor_for_exchange("weight", {"weight": tensor}, {}, {})


def check_checkpoint_worker() -> None:
    """The process that use_persistent_ckpt_worker starts: without the row it dies and training would wait for it."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    context = multiprocessing.get_context("spawn")
    requests, preloads, done = context.JoinableQueue(), context.JoinableQueue(), context.Queue()
    requests.put("DONE")
    worker = context.Process(target=PersistentAsyncCaller.async_loop, args=(0, requests, preloads, done))
    worker.start()
    worker.join()
    assert worker.exitcode == 0, "the checkpoint worker died"


def main() -> None:
    mamba_modules.install()
    patches.leave_uncompiled()
    targets = [target for patch in patches.PATCHES if patch.applies() for target in patch.targets]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    import megatron.training.training  # noqa: F401  imported once, here

    results = {}
    for target in targets:
        with reserve_port() as held:
            os.environ["MASTER_PORT"] = str(held.getsockname()[1])
            results[target] = trial(target, compose("train", OVERRIDES))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
