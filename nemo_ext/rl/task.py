"""RL task: a prompt with the data that its verifier needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nemo_ext.chat.formats import thinking_mode, to_record, to_sample
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.job.settings import check_keys

_REQUIRED = ("id", "environment", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One RL task; each line of a task file is a task's record.

    Attributes:
        id: identifier, unique in its file.
        environment: name of the verifier or tool environment, one of `nemo_ext.rl.environments.known_environments()`.
        prompt: messages before the response.
        reference: data that the environment checks the response against; its keys depend on the environment.
        tools: JSON schemas of the declared tools, as OpenAI's `tools`.
        domain: group for data shares, curricula and metrics; by default the name of the environment.
        thinking: whether thinking mode is requested; None for models without thinking modes.
    """

    id: str
    environment: str
    prompt: tuple[Message, ...]
    reference: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    domain: str = ""
    thinking: bool | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "task") -> "Task":
        """Build a task from its record in a task file; a prompt given as a string becomes one user message.

        Raises:
            ValueError: the record is invalid; the message names `where`, the key, its value and the allowed values.
        """
        check_keys(record, _KEYS, required=_REQUIRED, where=where)
        for key in ("id", "environment", "domain"):
            value = record.get(key)
            numbered = key == "id" and isinstance(value, int) and not isinstance(value, bool)
            omitted = value is None and key not in _REQUIRED
            if not (numbered or omitted or (isinstance(value, str) and value)):
                raise ValueError(f"{where}: {key} must be a non-empty string, not {value!r}")
        prompt, reference = record["prompt"], record.get("reference") or {}
        if not isinstance(reference, Mapping):
            raise ValueError(f"{where}: reference must be a mapping, not {reference!r}")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            thinking = thinking_mode(record.get("thinking"), "thinking")
        except ValueError as error:
            raise ValueError(f"{where}: invalid thinking mode ({error})") from None
        try:
            sample = to_sample({"messages": messages, "tools": record.get("tools")}, id=record["id"], format="openai")
        except ValueError as error:
            problem = str(error).replace("messages", "prompt", 1)  # the key in a task's record
            raise ValueError(f"{where}: invalid prompt or tools ({problem})") from None
        return cls(
            id=str(record["id"]),
            environment=record["environment"],
            prompt=sample.messages,
            reference=reference,
            tools=sample.tools,
            domain=record.get("domain") or record["environment"],
            thinking=thinking,
        )

    def record(self) -> dict[str, Any]:
        """Return the task's record for a task file; the inverse of `from_record`."""
        sample = to_record(Sample(id=self.id, messages=self.prompt, tools=self.tools))
        record: dict[str, Any] = {
            "id": self.id,
            "environment": self.environment,
            "domain": self.domain,
            "prompt": sample["messages"],
            "reference": dict(self.reference),
        }
        if self.tools:
            record["tools"] = sample["tools"]
        if self.thinking is not None:
            record["thinking"] = self.thinking
        return record


_KEYS = tuple(attribute.name for attribute in fields(Task))
