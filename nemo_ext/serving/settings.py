"""Settings of `nemo-ext serve`, and of jobs that send requests to a served model."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Extra, Place, checked

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServingSettings:
    """Settings of the section `serving`.

    Attributes:
        engine: transformers (any machine, any class of `nemo-ext convert`) or vllm.
        name: name of the model at the endpoint; null for the name of its directory.
        host: address at which the endpoint listens.
        key_variable: environment variable that holds the key; None to generate a key.
        open: True to require no key; only for loopback addresses.
        device: auto, cpu, cuda or cuda:N.
        dtype: type of the weights; None for float32 on the CPU and the checkpoint's type elsewhere.
        max_length: maximum number of tokens in prompt and answer; None for the model's.
        max_batch: maximum number of concurrent answers, for transformers.
        replicas: number of servers behind the endpoint.
        least: number of replicas that must answer before the endpoint is announced; None for all.
        replica: number of the replica that this process runs, in a Slurm array; None for all of them.
        gpus: number of GPUs per node that a replica uses.
        nodes: number of nodes per replica, for vllm.
        draft: mtp to draft tokens with the model's multi-token prediction (speculative decoding), for vllm; None for
            no drafts.
        draft_tokens: number of tokens per draft; None for 1.
        vllm: further arguments of `vllm serve`, such as {gpu_memory_utilization: 0.85}.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    name: Annotated[str, BeforeValidator(lambda name: "model" if name is None else name)] = "model"
    host: str = "127.0.0.1"
    key_variable: str | None = None
    open: bool = False
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_length: PositiveInt | None = None
    max_batch: PositiveInt = 64
    replicas: PositiveInt = 1
    least: PositiveInt | None = None
    replica: NonNegativeInt | None = None
    gpus: PositiveInt = 1
    nodes: PositiveInt = 1
    draft: Literal["mtp"] | None = None
    draft_tokens: PositiveInt | None = None
    vllm: Extra = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.open and self.host not in LOOPBACK:
            raise ValueError(
                f"open=true: host={self.host} is reachable from other machines, so a key is required; set open=false"
            )
        if self.open and self.key_variable is not None:
            raise ValueError("open=true and key_variable cannot be combined: remove one of them")
        if self.least is not None and self.least > self.replicas:
            raise ValueError(f"least={self.least} exceeds replicas={self.replicas}: lower least, or raise replicas")
        if own := {"host", "port", "api_key", "served_model_name", "max_model_len", "tensor_parallel_size"} & set(
            self.vllm
        ):
            raise ValueError(
                f"vllm must not contain {', '.join(sorted(own))}; set serving.host, port, serving.name, "
                "serving.max_length, serving.gpus or serving.key_variable instead"
            )
        if self.draft is None and self.draft_tokens is not None:
            raise ValueError(f"draft_tokens={self.draft_tokens} requires draft=mtp: set draft, or remove draft_tokens")
        if self.draft is not None and "speculative_config" in self.vllm:
            raise ValueError(f"draft={self.draft} and vllm.speculative_config cannot be combined: remove one of them")
        used = {"vllm": self.vllm, f"nodes={self.nodes}": self.nodes > 1, f"draft={self.draft}": self.draft}
        if self.engine != "vllm" and (keys := [key for key, value in used.items() if value]):
            raise ValueError(f"{keys[0]} requires engine=vllm, not {self.engine}: set engine, or remove {keys[0]}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ServingSettings":
        """Read the settings from a config's section `serving`; the model's name defaults to its directory's name.

        Raises:
            ValueError: a setting is invalid; the message names the key, its value and the expected values.
        """
        name = config["serving"].get("name") or Path(str(config["served"])).expanduser().resolve().name
        return checked(cls, {**config["serving"], "name": name}, where="serving")

    def key(self) -> str | None:
        """Return the endpoint's API key: the value of the environment variable `key_variable`, or a new random key.

        It is None for an open endpoint.

        Raises:
            ValueError: the environment variable is not set.
        """
        if self.open:
            return None
        if self.key_variable is None:
            return secrets.token_urlsafe(32)
        if not (key := os.environ.get(self.key_variable)):
            raise ValueError(
                f"serving.key_variable: the environment variable {self.key_variable} is not set; set it to the key"
            )
        return key


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AskingSettings:
    """Settings of a job that sends requests to a served model or an endpoint.

    Attributes:
        endpoint: run directory of `nemo-ext serve`, or URL that ends in /v1; null to serve `model` while the job runs.
        served: Hugging Face directory or run directory; with an endpoint, the model's name there.
        key_variable: environment variable that holds the endpoint's key; null for the key in the run directory.
        serving: settings for serving `model` (see `nemo-ext serve --help`).
        files_from: for a Megatron run directory, directory with tokenizer, chat template and generation config.
        trust_remote_code: True to allow Python files in the model's directory to run.
    """

    endpoint: Place | None = None
    served: Place | None = None
    key_variable: str | None = None
    serving: ServingSettings = Field(default_factory=ServingSettings)
    files_from: Place | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(
                f"key_variable: the environment variable {self.key_variable} is not set; set it to the key"
            )
