"""OpenAI API requests that this server supports; unsupported fields are rejected rather than ignored.

Source: https://platform.openai.com/docs/api-reference/chat; top_k, ignore_eos and chat_template_kwargs are from vLLM.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

_MOST_CHOICES = 128
_MOST_LOGPROBS = 20
_SOMETHING = object()
_SAYS_NOTHING: Mapping[str, bool | float] = {
    **dict.fromkeys(("no_stop_trim", "return_hidden_states"), False),  # of vllm-router (0.1.17)
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "store", "return_token_ids"), False),
    **dict.fromkeys(("min_p", "min_tokens"), 0),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), 1),
}
"""Mapping from unsupported field to its neutral value, with which it is ignored."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


class _Common(BaseModel):
    """Fields that both kinds of requests have; None is equivalent to omitting a field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:
        """Remove unsupported fields that are null, empty or neutral, as many clients and routers send them."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields or not (value in (None, [], {}) or value == _SAYS_NOTHING.get(name, _SOMETHING))
        }

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    seed: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16), BeforeValidator(_listed)] = []
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    ignore_eos: bool | None = None
    # Fields that vllm-router (0.1.17) adds to every request; other values are not supported.
    skip_special_tokens: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None
    user: str | None = None
    # Fields that have no effect at these values, which clients send by default.
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: dict[str, JsonValue] | None = Field(default=None, max_length=0)


class Completion(_Common):
    """Request to `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """List the prompts, each a string or a list of token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(token, int) for token in given):
            return [[token for token in given if isinstance(token, int)]]
        return [each for each in given if isinstance(each, str | list)]


class Chat(_Common):
    """Request to `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    enable_thinking: bool | None = None  # as in chat_template_kwargs
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
