"""Policy and generation for NeMo-RL without a GPU: a small Hugging Face model instead of its workers and vLLM.

They implement NeMo-RL's interfaces, so that its `setup`, loops, refit, losses, checkpoints, rollouts and
environments run unchanged. The policy computes in this process, as the DTensor worker does; the generation is a Ray
actor that starts with random weights and gets trained ones only from refits.
"""

import copy
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ray
import torch
from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
from nemo_rl.algorithms.loss.utils import prepare_loss_input
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.native_checkpoint import load_checkpoint, save_checkpoint
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

_sent: dict[str, Any] = {}
"""Weights on their way from the policy to the generation: what NCCL or CUDA IPC carries on GPUs."""


def _nothing(*arguments: Any, **keywords: Any) -> Any:
    """Replacement for functions that a CPU does not need."""
    return None


class CpuCluster:
    """Stand-in for `RayVirtualCluster`: one worker that needs no resources."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def get_master_address_and_port(self) -> tuple[str, int]:
        return "localhost", 0

    def world_size(self) -> int:
        return 1

    shutdown = _nothing


class CpuPolicy(ColocatablePolicyInterface):
    """Policy that trains in this process in the same steps as NeMo-RL's DTensor worker.

    Args:
        config: section `policy` of the master config: model_name, optimizer, scheduler, max_grad_norm, batch sizes.
        weights_path, optimizer_path: folders of the checkpoint to resume from.
        init_reference_model: whether to keep a copy of the initial weights, for the KL penalty and for DPO.
    """

    def __init__(
        self,
        cluster: Any,
        config: Any,
        tokenizer: Any,
        *,
        weights_path: Any = None,
        optimizer_path: Any = None,
        init_reference_model: bool = True,
        **others: Any,
    ) -> None:
        self.cfg, self.tokenizer = config, tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if init_reference_model else None
        given = config["optimizer"]
        self.optimizer = _named(given["name"])(self.model.parameters(), **given["kwargs"])
        self.scheduler = _scheduler(self.optimizer, config.get("scheduler"))
        self.sharding_annotations = SimpleNamespace(get_axis_size=lambda name: 1)
        generation = config.get("generation") or {}
        self.sampling = TrainingSamplingParams(temperature=generation.get("temperature", 1.0))
        if weights_path is not None:
            resumed = (self.optimizer, self.scheduler) if optimizer_path else (None, None)
            load_checkpoint(self.model, weights_path, *resumed, optimizer_path)

    def _logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        # Right padding is not masked, as in the worker: causal attention never reads it.
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits / self.sampling.temperature
        return logits

    @torch.no_grad()
    def _logprobs(self, model: Any, data: Any, size: int | None) -> torch.Tensor:
        """Log-probability of each token given the previous ones, [batch, tokens]; 0 for the first."""
        parts = []
        for ids in data["input_ids"].split(size or self.cfg["logprob_batch_size"]):
            found = self._logits(model.eval(), ids)[:, :-1].log_softmax(-1)
            parts.append(torch.nn.functional.pad(found.gather(-1, ids[:, 1:, None])[..., 0], (1, 0)))
        return torch.cat(parts)

    def get_logprobs(self, data: Any, timer: Any = None, micro_batch_size: int | None = None) -> Any:
        return BatchedDataDict(logprobs=self._logprobs(self.model, data, micro_batch_size))

    def get_reference_policy_logprobs(self, data: Any, micro_batch_size: int | None = None, timer: Any = None) -> Any:
        return BatchedDataDict(reference_logprobs=self._logprobs(self.reference, data, micro_batch_size))

    def train(
        self,
        data: Any,
        loss_fn: Any,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any = None,
        **others: Any,
    ) -> dict[str, Any]:
        size = gbs or self.cfg["train_global_batch_size"]
        batches = data.size // size
        losses, norms, metrics = [], [], defaultdict(list)
        self.model.train(not eval_mode)
        for number in range(batches):
            batch = data.slice(number * size, (number + 1) * size)
            mask = batch["sample_mask"]
            valid = {"global_valid_seqs": mask.sum()}
            valid["global_valid_toks"] = (batch["token_mask"][:, 1:] * mask[:, None]).sum()
            total = 0.0
            for part in batch.make_microbatch_iterator(mbs or self.cfg["train_micro_batch_size"]):
                with torch.no_grad() if eval_mode else nullcontext():
                    logits = self._logits(self.model, part["input_ids"])
                    given, part = prepare_loss_input(logits, part, loss_fn, sampling_params=self.sampling)
                    loss, found = loss_fn(data=part, **given, **valid)
                if not eval_mode:
                    loss.backward()
                total += float(loss)
                group = self.optimizer.param_groups[0]
                found |= {
                    key: value / batches for key, value in found.items() if "_min" not in key and "_max" not in key
                }
                found |= {"lr": group["lr"], "wd": group["weight_decay"]}
                for key, value in (found | {key: float(value) for key, value in valid.items()}).items():
                    metrics[key].append(value)
            losses.append(total)
            if not eval_mode:
                most = self.cfg["max_grad_norm"] or float("inf")
                norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), most))
                self.optimizer.step()
                self.optimizer.zero_grad()
        if not eval_mode:
            self.scheduler.step()
        norm = norms[-1][None] if norms else None
        return {"loss": torch.tensor(losses), "grad_norm": norm, "all_mb_metrics": dict(metrics)}

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None, **others: Any
    ) -> None:
        states = (self.optimizer, self.scheduler) if optimizer_path else (None, None)
        save_checkpoint(self.model, weights_path, *states, optimizer_path, self.tokenizer, tokenizer_path)

    def _send(self, *arguments: Any, **keywords: Any) -> list[Any]:
        _sent["weights"] = ray.put(({**self.model.state_dict()}, int(self.scheduler.last_epoch)))
        return []

    stream_weights_via_ipc_zmq = broadcast_weights_for_collective = _send

    def init_collective(self, *arguments: Any, **keywords: Any) -> list[Any]:
        return []

    def get_free_memory_bytes(self) -> int:
        return 1 << 30

    def shutdown(self) -> bool:
        return True

    @torch.no_grad()
    def get_topk_logits(self, data: Any, k: int, micro_batch_size: int | None = None, timer: Any = None) -> Any:
        parts = data["input_ids"].split(micro_batch_size or self.cfg["logprob_batch_size"])
        found = [self._logits(self.model.eval(), ids).topk(k) for ids in parts]
        logits, places = (torch.cat(values) for values in zip(*found, strict=True))
        return BatchedDataDict(topk_logits=logits, topk_indices=places)

    def calibrate_qkv_fp8_scales(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError("FP8 has no place here")

    prepare_for_training = finish_training = prepare_for_lp_inference = finalize_async_save = _nothing
    offload_before_refit = offload_after_refit = prepare_refit_info = print_node_ip_and_gpu_id = _nothing


class CpuTeacher:
    """Stand-in for `TeacherWorkerGroup`: a policy of its own weights that only measures."""

    use_sequence_packing = True
    sharding_annotations = SimpleNamespace(get_axis_size=lambda name: 1)

    def __init__(self, policy: dict[str, Any], tokenizer: Any, folder: str) -> None:
        self.policy = CpuPolicy(None, {**policy, "model_name": folder}, tokenizer, init_reference_model=False)

    def get_logprobs(self, data: Any) -> Any:
        return BatchedDataDict(reference_logprobs=self.policy.get_logprobs(data)["logprobs"])

    shutdown = _nothing


def teachers(master: Any, policy: Any, tokenizer: Any, **others: Any) -> tuple[dict[str, CpuTeacher], dict[str, str]]:
    """Replacement for NeMo-RL's `create_teacher_worker_groups`."""
    folders = master.on_policy_distillation.teacher_model_by_agent_name
    return {name: CpuTeacher(policy, tokenizer, place) for name, place in folders.items()}, {n: n for n in folders}


class CpuGeneration(GenerationInterface):
    """Stand-in for vLLM that samples from a model in a Ray actor."""

    def __init__(self, cluster: Any, config: Any, **others: Any) -> None:
        self.cfg = config
        self.engine = ray.remote(Engine).options(num_cpus=0).remote(dict(config), torch.initial_seed())

    def generate(self, data: Any, greedy: bool = False, **others: Any) -> Any:
        written = ray.get(self.engine.generate.remote(data["input_ids"], data["input_lengths"], greedy))
        return BatchedDataDict(written)

    async def generate_async(self, data: Any, greedy: bool = False, **others: Any) -> AsyncIterator[tuple[int, Any]]:
        for row in range(data.size):
            ids, lengths = data["input_ids"][row : row + 1], data["input_lengths"][row : row + 1]
            written = await self.engine.generate.remote(ids, lengths, greedy)
            yield row, BatchedDataDict(written, gen_leader_worker_idx=[[0]])

    def _receive(self) -> list[Any]:
        return [self.engine.load.remote(_sent["weights"])]

    update_weights_via_ipc_zmq = update_weights_from_collective = _receive

    def init_collective(self, *arguments: Any, **keywords: Any) -> list[Any]:
        return []

    def _ready(self, *arguments: Any, **keywords: Any) -> bool:
        return True

    prepare_for_generation = finish_generation = invalidate_kv_cache = _ready

    def shutdown(self) -> bool:
        ray.kill(self.engine)
        return True

    prepare_refit_info = snapshot_step_metrics = clear_vllm_logger_metrics = _nothing

    def get_step_metrics(self) -> dict[str, float]:
        return {}


class Engine:
    """Generating model; its samples depend on the seed, the step of its weights and the prompts."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.config, self.seed, self.step = config, seed, -1
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config["model_name"])).float().eval()
        self.asked: Counter[int] = Counter()

    def load(self, sent: tuple[dict[str, torch.Tensor], int]) -> bool:
        weights, self.step = sent
        self.model.load_state_dict(weights)
        self.asked.clear()
        return True

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, lengths: torch.Tensor, greedy: bool) -> dict[str, torch.Tensor]:
        """Fields of `GenerationOutputSpec` for right-padded prompts."""
        before = [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
        pad, ends = self.config["_pad_token_id"], self.config["stop_token_ids"]
        left = pad_sequence(before, batch_first=True, padding_value=pad, padding_side="left")
        width = left.shape[1]
        given = torch.arange(width) >= width - lengths[:, None]
        prompts = zlib.crc32(left.numpy().tobytes())
        torch.manual_seed(zlib.crc32(repr((self.seed, self.step, prompts, self.asked[prompts])).encode()))
        self.asked[prompts] += 1
        sampling = {"temperature": self.config["temperature"], "top_p": self.config["top_p"], "top_k": 0}
        made = self.model.generate(
            left,
            attention_mask=given.long(),
            do_sample=not greedy,
            max_new_tokens=min(self.config["max_new_tokens"], self.config["vllm_cfg"]["max_model_len"] - width),
            pad_token_id=pad,
            eos_token_id=ends,
            return_dict_in_generate=True,
            output_logits=True,
            **({} if greedy else sampling),
        )
        written = made.sequences[:, width:]
        logprobs = (torch.stack(made.logits, 1) / self.config["temperature"]).log_softmax(-1)
        logprobs = logprobs.gather(-1, written[..., None])[..., 0]
        ended = torch.isin(written, torch.tensor(ends))
        counts = torch.where(ended.any(1), ended.int().argmax(1) + 1, written.shape[1])
        new = [row[:count] for row, count in zip(written, counts, strict=True)]
        of_new = [row[:count] for row, count in zip(logprobs, counts, strict=True)]
        whole = [torch.cat(pair) for pair in zip(before, new, strict=True)]
        scores = [torch.cat((torch.zeros(len(a)), b)) for a, b in zip(before, of_new, strict=True)]
        return {
            "output_ids": pad_sequence(whole, batch_first=True, padding_value=pad),
            "logprobs": pad_sequence(scores, batch_first=True),
            "generation_lengths": counts,
            "unpadded_sequence_lengths": lengths + counts,
            "truncated": ~ended.any(1),
        }


class Kept(Logger):
    """NeMo-RL's logger, which also stores metrics by prefix and step."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.logged: dict[tuple[str, int], dict[str, Any]] = {}
        KEPT.append(self)

    def log_metrics(self, metrics: Any, step: int, prefix: str | None = "", **others: Any) -> None:
        super().log_metrics(metrics, step, prefix=prefix, **others)
        self.logged.setdefault((prefix or "", step), {}).update(metrics)


KEPT: list[Kept] = []
"""Loggers of all runs of this process."""
REPLACED = {"Policy": CpuPolicy, "VllmGeneration": CpuGeneration, "RayVirtualCluster": CpuCluster, "Logger": Kept}
"""What is replaced in NeMo-RL's modules of GRPO, distillation and DPO."""


def _named(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module, fromlist=[kind]), kind)


def _scheduler(optimizer: Any, given: Any) -> Any:
    """Scheduler from the section `policy.scheduler`: a list of torch's schedulers that ends with milestones."""
    if not given:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    parts = [_named(part["name"])(optimizer, **part["kwargs"]) for part in given if "name" in part]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, given[-1]["milestones"])
