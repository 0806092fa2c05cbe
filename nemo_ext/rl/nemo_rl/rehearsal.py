"""Dry run of NeMo-RL's own `setup` with a run's config, without GPUs or Ray, to find errors before the job is queued.

It runs the checkout's real config classes, `grpo.setup` or `dpo.setup`, the checks in the constructors of `Policy` and
`VllmGeneration`, and the division of a batch. Stand-ins replace the cluster, the worker processes, loggers, checkpoints
and the data, of which only the size matters. Checks inside workers are omitted, as they need Megatron-Bridge, Automodel
or vLLM.

    python -m nemo_ext.rl.nemo_rl.rehearsal CONFIG.json      # {"section": "grpo", "config": {...}}
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.checkout import Section

REFUSED, NO_PACKAGES = 1, 3
"""Exit codes: NeMo-RL rejects the config; NeMo-RL cannot be imported."""


class _Cluster:
    """Stand-in for RayVirtualCluster whose nodes and GPUs need not exist."""

    _sorted_bundle_indices = None

    def __init__(self, *, bundle_ct_per_node_list: list[int], num_gpus_per_node: int, **others: Any) -> None:
        self._bundles, self.num_gpus_per_node = bundle_ct_per_node_list, num_gpus_per_node

    def world_size(self) -> int:
        return sum(self._bundles)

    def get_master_address_and_port(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def _init_placement_groups(self, **how: Any) -> None:
        return None

    def get_placement_groups(self) -> None:
        return None


class _Workers(MagicMock):
    """Stand-in for RayWorkerGroup; its data-parallel size is taken from the sharding annotations."""

    def __init__(self, *arguments: Any, sharding_annotations: Any = None, **others: Any) -> None:
        super().__init__()
        if sharding_annotations is not None:
            self.dp_size = sharding_annotations.get_axis_size("data_parallel")

    def _get_child_mock(self, **keywords: Any) -> MagicMock:
        return MagicMock(**keywords)


class _Data:
    """Stand-in for a dataset with as many items as a run needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(
            f"setup reads data, which a rehearsal does not have; use a supported version, {compat.FITS}"
        )


def rehearse(master: Mapping[str, Any], section: Section) -> None:
    """Run NeMo-RL's setup for a master config without training; raise ValueError if NeMo-RL rejects it or is missing.

    Args:
        master: master config, whose `policy.generation` is completed in place.
    """
    module = compat.algorithm(section)
    config = {**master}
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1, pad_token="<pad>", eos_token="</s>")
    try:
        with _stand_ins(module):
            if section != "dpo":
                compat.with_generation(config, tokenizer)
            master_config = compat.master_config(module, config)
            steps = min(int(config[section]["max_num_steps"]), 1000)
            if section != "dpo":
                loop = config[section]
                data = _Data((steps + 2) * int(loop["num_prompts_per_step"]))
                ready = compat.set_up(section, master_config, tokenizer, data, _Data(8))
                size, pairs = loop["num_prompts_per_step"] * loop["num_generations_per_prompt"], 1
            else:
                data = _Data(steps * int(config["policy"]["train_global_batch_size"]))
                ready = compat.set_up(section, master_config, tokenizer, data, {"default": _Data(8)})
                size, pairs = config["policy"]["train_global_batch_size"], 2
                validation = config["dpo"]["val_global_batch_size"]
                _divide(ready.policy, validation, validation, config["dpo"]["val_micro_batch_size"], pairs)
            policy = config["policy"]
            _divide(ready.policy, size, policy["train_global_batch_size"], policy["train_micro_batch_size"], pairs)
            _packing(policy)
    except Exception as error:  # NeMo-RL raises many types, mostly assertions
        text = " ".join(str(error).split()) or "no reason given"
        raise ValueError(
            f"NeMo-RL's {section}.setup rejected the config ({type(error).__name__}: {text}); change the settings that "
            "the error names"
        ) from error


@contextlib.contextmanager
def _stand_ins(module: Any) -> Iterator[None]:
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy")
    vllm = importlib.import_module("nemo_rl.models.generation.vllm.vllm_generation")
    checkpoints = MagicMock(
        **{
            "return_value.get_latest_checkpoint_path.return_value": None,
            "return_value.load_training_info.return_value": None,
            "return_value.get_resume_paths.return_value": (None, None),
        }
    )
    stand_ins: list[tuple[Any, str, Any]] = [
        (module, "RayVirtualCluster", _Cluster),
        (module, "Logger", MagicMock()),
        (module, "CheckpointManager", checkpoints),
        (policy, "RayQueue", MagicMock()),
        (policy, "RayWorkerBuilder", MagicMock()),
        (policy, "RayWorkerGroup", _Workers),
        (policy.Policy, "print_node_ip_and_gpu_id", lambda policy: None),
        (policy.Policy, "init_collective", lambda *arguments, **keywords: []),
        (vllm.VllmGeneration, "init_collective", lambda *arguments, **keywords: []),
        (vllm, "RayWorkerBuilder", MagicMock()),
        (vllm, "RayWorkerGroup", _Workers),
        (vllm.VllmGeneration, "_get_tied_worker_bundle_indices", lambda *arguments: []),
        (importlib.import_module("ray"), "get", lambda *arguments, **keywords: [{}]),
        # The latter since main of 2026-08.
        *((module, name, MagicMock()) for name in ("NemoGym", "spinup_nemo_gym_actor") if hasattr(module, name)),
    ]
    if importlib.util.find_spec("nemo_rl.algorithms.opd"):  # teachers, whose workers' class is imported late
        workers = importlib.import_module("nemo_rl.distributed.worker_groups")
        stand_ins.append((importlib.import_module("nemo_rl.algorithms.opd"), "RayVirtualCluster", _Cluster))
        stand_ins += [(workers, "RayWorkerBuilder", MagicMock()), (workers, "RayWorkerGroup", _Workers)]
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in stand_ins:
            stack.enter_context(patch.object(where, name, stand_in))
        # The first is also set by `nemo_ext.rl.nemo_rl.run`; the tokenizer is a stand-in.
        variables = {"TORCH_CUDA_ARCH_LIST": "9.0", "NRL_SKIP_DISTILLATION_TOKENIZER_CHECK": "true"}
        stack.enter_context(patch.dict(os.environ, variables))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def _divide(policy: Any, size: int, batch: int, micro: int, pairs: int) -> None:
    """Divide a batch among the data-parallel ranks and into microbatches, as training does.

    Args:
        policy: NeMo-RL's policy, which has the ranks.
        size: number of items to divide.
        batch: number of items in a batch of training.
        micro: number of items in a microbatch.
        pairs: number of sequences per item: 2 for preference pairs, else 1.

    Raises:
        ValueError: a rank's part of the batch is not a multiple of the microbatch size.
    """
    torch = importlib.import_module("torch")
    kind = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    ranks = policy.sharding_annotations.get_axis_size("data_parallel")
    parts = kind({"input_ids": torch.zeros(size * pairs, 1)}).shard_by_batch_size(ranks, batch_size=batch * pairs)
    if (batch // ranks) % micro:
        raise ValueError(
            f"a batch of {batch} on {ranks} data-parallel ranks is {batch // ranks} per rank, which is not divisible "
            f"by the microbatch size {micro}; change rl.batch or micro_batch"
        )
    assert len(parts) == ranks


def _packing(policy: Mapping[str, Any]) -> None:
    """Raise ValueError if the backend's workers would reject the policy's context parallelism or sequence packing."""
    packs, megatron = policy["sequence_packing"]["enabled"], policy["megatron_cfg"]["enabled"]
    context = policy["megatron_cfg" if megatron else "dtensor_cfg"]["context_parallel_size"]
    if context > 1 and packs != megatron:
        rule = "Megatron requires" if megatron else "DTensor does not support"
        raise ValueError(
            f"policy.sequence_packing.enabled must be {str(megatron).lower()}, because with context parallelism "
            f"({context}) {rule} sequence packing"
        )


def main() -> int:
    """Check the config in a file with `rehearse`; print the reason if it is rejected, and return the exit code."""
    run = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        compat.algorithm("grpo")
    except ValueError as error:
        print(error)
        return NO_PACKAGES
    try:
        rehearse(run["config"], run["section"])
    except ValueError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
