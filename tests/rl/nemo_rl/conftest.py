"""NeMo-RL from a checkout, with stand-ins for its policies, which need GPUs. Everything else is real.

The policy is a table of bigrams, so the real losses have real gradients; its responses come from a script.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.compat import setting

ROOT = os.environ.get("NEMO_RL_ROOT")
REPOSITORY = Path(__file__).parents[3]
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")

if ROOT:
    sys.path.insert(0, ROOT)
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, str(REPOSITORY), others]).rstrip(os.pathsep)


@pytest.fixture(scope="session")
def nemo_rl() -> ModuleType:
    """GRPO module of the NeMo-RL checkout in NEMO_RL_ROOT."""
    if not ROOT:
        pytest.skip("NEMO_RL_ROOT is not set: a NeMo-RL checkout")
    return importlib.import_module("nemo_rl.algorithms.grpo")  # a checkout that cannot be imported is a failure


@pytest.fixture(scope="session")
def real() -> Checkout:
    """Checkout in NEMO_RL_ROOT; only its sources are read, so its packages may be missing."""
    if not ROOT:
        pytest.skip("NEMO_RL_ROOT is not set: a NeMo-RL checkout")
    return Checkout(ROOT)


@pytest.fixture(scope="session")
def ray_cluster(nemo_rl: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on this machine, and NeMo-RL's own actors in this interpreter."""
    import ray

    actors = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    system = importlib.import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM
    with patch.dict(actors, dict.fromkeys(actors, system)):
        ray.init(num_cpus=8, include_dashboard=False, _temp_dir=str(tmp_path_factory.mktemp("ray")))
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        # NeMo-RL's memory tracker looks for the one cluster of the machine, which may have others.
        with patch.dict(os.environ, RAY_ADDRESS=ray.get_runtime_context().gcs_address):
            yield
        ray.shutdown()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte tokenizer, which round-trips every text."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.chat_template = (REPOSITORY / "nemo_ext/chat/templates/nemotron3_nano.jinja").read_text()
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


@pytest.fixture
def tiny_llama(tokenizer_folder: Path, tokenizer: Any, tmp_path: Path) -> Path:
    """Hugging Face folder: a Llama with random weights, tokenizer and generation config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cpu_policy(ray_cluster: None) -> ModuleType:
    """The module cpu_policy.py of this folder, whose classes travel to Ray's actors by value."""
    import ray

    spec = importlib.util.spec_from_file_location("nemo_ext_cpu_policy", Path(__file__).with_name("cpu_policy.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture
def on_cpu(cpu_policy: ModuleType, nemo_rl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """NeMo-RL with the policy and the generation of cpu_policy.py in place of its workers."""
    for module in (importlib.import_module(f"nemo_rl.algorithms.{name}") for name in ("grpo", "distillation", "dpo")):
        for name, kind in cpu_policy.REPLACED.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, kind)
    # Its losses move tokens to the device.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor)
    return cpu_policy


class Bigrams:
    """Log-probabilities of the next token given the previous one."""

    def __init__(self, size: int) -> None:
        self.table = torch.zeros(size, size, requires_grad=True)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token, [batch, tokens]; 0 for the first."""
        following = self.logits(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros(len(ids), 1), following], dim=1)


class Writer:
    """Stand-in for vLLM that generates scripted responses.

    Args:
        tokenizer: tokenizer of the model.
        script: for each prompt one list of turns for each response.
    """

    def __init__(self, tokenizer: Any, script: Mapping[str, Sequence[Sequence[str]]], *, is_async: bool) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.cfg = {"backend": "vllm", "vllm_cfg": {"async_engine": is_async, "max_model_len": 1 << 20}}
        self.requires_kv_scale_sync = False
        self.weight_synchronizer = None
        self.begun: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def write(self, read: str) -> str:
        prompt = max((prompt for prompt in self.script if read.startswith(prompt)), key=len)
        responses = self.script[prompt]
        if read == prompt:
            self.begun[prompt] = self.begun.get(prompt, -1) + 1
            return responses[self.begun[prompt] % len(responses)][0]
        turns = next(turns for turns in responses if read.startswith(prompt + turns[0] + "<|im_end|>") and turns[1:])
        return turns[
            read.count("<|im_end|>\n<|im_start|>assistant") - prompt.count("<|im_end|>\n<|im_start|>assistant")
        ]

    def generate(self, data: Any, greedy: bool = False, **others: Any) -> Any:
        kind = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        before = [ids[:length] for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True)]
        written = [self._ids(self.write(self.tokenizer.decode(ids)) + "<|im_end|>") for ids in before]
        whole = [torch.cat(pair) for pair in zip(before, written, strict=True)]
        lengths = torch.tensor([len(ids) for ids in whole])
        output = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        return kind(
            output_ids=output,
            logprobs=torch.full(output.shape, -5.0),
            generation_lengths=torch.tensor([len(ids) for ids in written]),
            unpadded_sequence_lengths=lengths,
            truncated=torch.zeros(len(output), dtype=torch.bool),
        )

    async def generate_async(self, data: Any, greedy: bool = False, **others: Any) -> Any:
        written = self.generate(data)
        written["gen_leader_worker_idx"] = [[0]]
        yield 0, written

    def get_logger_metrics(self) -> dict[str, Any]:
        return {}

    def get_step_metrics(self) -> dict[str, Any]:
        return {}

    def get_vllm_logger_metrics(self) -> dict[str, Any]:
        return {}

    def blocks_training(self) -> bool:
        return False

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids)


def _nothing(*arguments: Any, **keywords: Any) -> Any:
    return None


@dataclass
class Policy:
    """Stand-in for NeMo-RL's policy: a table of bigrams, trained by NeMo-RL's loss.

    Attributes:
        model: the table.
        batches: training batches.
        losses: training losses.
        save: function that writes weights for a checkpoint in the format of the section `checkpointing`.
    """

    model: Bigrams
    batches: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    save: Callable[[Path, Any], None] = lambda weights, checkpointing: None
    sharding_annotations: Any = field(default_factory=lambda: SimpleNamespace(get_axis_size=lambda name: 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def save_checkpoint(self, weights_path: str, *arguments: Any, checkpointing_cfg: Any, **keywords: Any) -> None:
        self.save(Path(weights_path), checkpointing_cfg)

    def get_logprobs(self, data: Any, *arguments: Any, **keywords: Any) -> Any:
        return {"logprobs": self.model.logprobs(data["input_ids"]).detach()}

    def get_reference_policy_logprobs(self, data: Any, *arguments: Any, **keywords: Any) -> Any:
        return {"reference_logprobs": Bigrams(len(self.model.table)).logprobs(data["input_ids"]).detach()}

    def train(self, data: Any, loss_fn: Any, *arguments: Any, eval_mode: bool = False, **keywords: Any) -> Any:
        self.batches.append(dict(data))
        mask = data["sample_mask"]
        counts = {
            "global_valid_seqs": mask.sum(),
            "global_valid_toks": (data["token_mask"][:, 1:] * mask[:, None]).sum(),
        }
        logprobs = "next_token_logprobs" in inspect.signature(loss_fn.__call__).parameters
        inputs = (self.model.logprobs if logprobs else self.model.logits)(data["input_ids"])
        with patch.object(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor):
            given = {"next_token_logprobs": inputs[:, 1:]} if logprobs else {"next_token_logits": inputs}
            loss, metrics = loss_fn(data=data, **given, **counts)
        if not eval_mode:
            self.losses.append(float(loss.detach()))
            (gradient,) = torch.autograd.grad(loss, self.model.table)
            with torch.no_grad():
                self.model.table -= gradient
        found = {key: [value] for key, value in metrics.items()}
        found |= {key: [float(value)] for key, value in counts.items()} | {"lr": [1.0], "wd": [0.0]}
        return {"loss": loss.detach()[None], "grad_norm": torch.ones(1), "all_mb_metrics": found}


@dataclass
class Logger:
    """Logger that stores metrics by prefix and step."""

    logged: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str | None = "", **others: Any) -> None:
        self.logged.setdefault((prefix or "", step), {}).update(metrics)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def anew(self) -> "Logger":
        """Undo replaced methods, as in a new process."""
        vars(self).pop("log_metrics", None)
        return self


class Checkpoints:
    """Checkpointer without checkpoints."""

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def checkpointer(config: Any) -> Any:
    """NeMo-RL's checkpointer if checkpoints are enabled, else a stand-in."""
    section = setting(config, "checkpointing")
    if not section["enabled"]:
        return Checkpoints()
    return importlib.import_module("nemo_rl.utils.checkpoint").CheckpointManager(section)


def resumed(state: Any, checkpoints: Any) -> Any:
    """State of the last checkpoint as `setup` reads it, if any."""
    for key, value in (checkpoints.load_training_info(checkpoints.get_latest_checkpoint_path()) or {}).items():
        if isinstance(state, dict):
            state[key] = value
        else:
            setattr(state, key, value)
    return state


@dataclass
class Stage:
    """Run on NeMo-RL with stand-ins."""

    policy: Policy
    logger: Logger


@pytest.fixture
def grpo_stage(
    nemo_rl: ModuleType, ray_cluster: None, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Stage]:
    """Function that replaces the GPU parts of `grpo.setup`; the dataloader and the loss are NeMo-RL's."""
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    collate = importlib.import_module("nemo_rl.data.collate_fn").rl_collate_fn

    def stage(script: Mapping[str, Sequence[Sequence[str]]], *, is_async: bool = False) -> Stage:
        made = Stage(Policy(Bigrams(len(tokenizer))), Logger())
        writer = Writer(tokenizer, script, is_async=is_async)

        def setup(config: Any, tokenizer: Any, dataset: Any, val_dataset: Any, *others: Any) -> tuple[Any, ...]:
            is_plain = isinstance(config, dict)
            loss_config, grpo = (config["loss_fn"], config["grpo"]) if is_plain else (config.loss_fn, config.grpo)
            value = grpo.__getitem__ if isinstance(grpo, dict) else lambda key: getattr(grpo, key)
            train, validation = (
                data and loader(data, batch_size=value(size), shuffle=False, collate_fn=collate, drop_last=drop)
                for data, size, drop in (
                    (dataset, "num_prompts_per_step", True),
                    (val_dataset, "val_batch_size", False),
                )
            )
            initial = getattr(nemo_rl, "_initial_grpo_save_state", None) or nemo_rl._default_grpo_save_state
            first, saving = (made.policy, writer), checkpointer(config)
            state = resumed(initial(), saving)
            last = (None, train, validation, nemo_rl.ClippedPGLossFn(loss_config), made.logger.anew(), saving)
            if is_plain:
                return (*first, *last, state, config)
            return (*first, None, *last, state, config, {}, {})

        monkeypatch.setattr(nemo_rl, "setup", setup)
        monkeypatch.setattr(nemo_rl, "refit_policy_generation", lambda *arguments, **keywords: {})
        return made

    return stage


@pytest.fixture
def grpo_config(nemo_rl: ModuleType, tokenizer_folder: Path) -> Callable[..., dict[str, Any]]:
    """NeMo-RL's example of a GRPO config with Hydra overrides, as plain mappings."""
    return lambda *overrides: _config("grpo_math_1B", tokenizer_folder, *overrides)


@pytest.fixture
def dpo_config(nemo_rl: ModuleType, tokenizer_folder: Path) -> Callable[..., dict[str, Any]]:
    """NeMo-RL's example of a DPO config."""
    return lambda *overrides: _config("dpo", tokenizer_folder, *overrides)


def _config(name: str, tokenizer: Path, *overrides: str) -> dict[str, Any]:
    omegaconf = importlib.import_module("omegaconf").OmegaConf
    module = importlib.import_module("nemo_rl.utils.config")
    if hasattr(module, "register_omegaconf_resolvers"):
        module.register_omegaconf_resolvers()
    elif not omegaconf.has_resolver("mul"):
        omegaconf.register_new_resolver("mul", lambda one, other: one * other)
    config = module.load_config(f"{ROOT}/examples/configs/{name}.yaml")
    common = [f"policy.tokenizer.name={tokenizer}", "checkpointing.enabled=false", "logger.wandb_enabled=false"]
    return omegaconf.to_container(module.parse_hydra_overrides(config, [*common, *overrides]), resolve=True)


@pytest.fixture
def dpo_stage(nemo_rl: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Function that replaces the GPU parts of `dpo.setup`; dataloaders, collate function and loss are NeMo-RL's."""
    dpo = importlib.import_module("nemo_rl.algorithms.dpo")
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    made = Stage(Policy(Bigrams(len(tokenizer))), Logger())

    def setup(config: Any, tokenizer: Any, dataset: Any, val_datasets: Mapping[str, Any]) -> tuple[Any, ...]:
        collate = functools.partial(
            dpo.preference_collate_fn, tokenizer=tokenizer, make_sequence_length_divisible_by=1, add_loss_mask=True
        )
        train = loader(dataset, batch_size=2, shuffle=False, collate_fn=collate, drop_last=True)
        validation = {name: loader(data, batch_size=2, collate_fn=collate) for name, data in val_datasets.items()}
        loss = dpo.DPOLossFn(config["dpo"] if isinstance(config, dict) else config.dpo)
        initial = getattr(dpo, "_initial_dpo_save_state", None) or dpo._default_dpo_save_state
        saving = checkpointer(config)
        logger, state = made.logger.anew(), resumed(initial(), saving)
        return made.policy, None, train, validation, loss, logger, saving, state, config

    monkeypatch.setattr(dpo, "setup", setup)
    monkeypatch.setattr(importlib.import_module("nemo_ext.rl.nemo_rl.run"), "_start_ray", lambda: None, raising=True)
    return made
