"""Ranks as forked children of one process that has imported Megatron: what torchrun starts, without its imports.

Run as a script: reads lines `{"config": FILE, "ranks": 2, "log": FILE, "folder": DIR, "environment": {}}`, or with
Python's arguments as `command` (`["-m", MODULE, ...]` or `[SCRIPT, ...]`) in place of `config`, and answers each with
the exit codes of the ranks. As under torchrun, ranks are killed once one of them has failed.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def preload() -> None:
    """Imports what ranks import, and nothing that starts a thread."""
    from nemo_ext.megatron.cpu import runtime

    runtime.enable()
    for name in ("training.training", "core.tokenizers.text"):
        import_module(f"megatron.{name}")
    for name in ("distillation", "expert_bias", "metrics", "model", "packed", "phases", "trainer"):
        import_module(f"nemo_ext.megatron.{name}")
    for name in ("_dynamo", "_dynamo.variables.builder", "_functorch.deprecated", "onnx", "utils.tensorboard"):
        import_module(f"torch.{name}")  # the optimizer imports the compiler, whatever is compiled
    import_module("einops._torch_specific")
    # The help of Megatron's flags comes from its own sources, which every parser of every rank would parse: 0.2 s.
    utils = import_module("megatron.training.argument_utils")
    if factory := getattr(utils, "ArgumentGroupFactory", None):  # Megatron-Core 0.19
        factory._get_field_docstrings = lambda self, config: {}
    megatron_parser = import_module("nemo_ext.megatron.arguments").megatron_parser
    megatron_parser()


def rank(number: int, *, job: dict, port: int) -> NoReturn:
    """The child that is one rank."""
    from nemo_ext.job.ranks import training_rank
    from nemo_ext.job.run_directory import read_config
    from nemo_ext.megatron.rank import end_with_parent

    end_with_parent(signal.SIGKILL)
    os.chdir(job["folder"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= job["environment"]
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(job["ranks"])}
    if "command" in job:
        program(job["command"])
    import_module(training_rank(read_config(Path(job["config"])))).run(job["config"])


def program(words: Sequence[str]) -> NoReturn:
    """`python WORDS` in this process, which writes checkpoints without a helper, as the trainer does."""
    from nemo_ext.megatron.rank import leave
    from nemo_ext.megatron.trainer import write_checkpoints_without_helper

    write_checkpoints_without_helper(Namespace(async_save=False))
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exit_:
        if isinstance(exit_.code, int):
            code = exit_.code
        elif exit_.code is not None:
            print(exit_.code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


def ended(job: dict, port: int) -> list[int]:
    """Exit codes of the ranks of one job."""
    children = []
    for number in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            rank(number, job=job, port=port)
        children.append(child)
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[child] for child in children]


def main() -> None:
    from nemo_ext.job.ranks import reserve_port

    preload()
    for line in sys.stdin:
        with reserve_port() as held:
            print(json.dumps(ended(json.loads(line), held.getsockname()[1])), flush=True)


if __name__ == "__main__":
    main()
