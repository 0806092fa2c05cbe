"""The engine's HTTP server, which implements OpenAI's API with Starlette."""

import asyncio
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_ext.chat.formats import template_messages
from nemo_ext.chat.response import OPEN
from nemo_ext.chat.template import Template
from nemo_ext.serving.engine import Engine, Sampling, Token
from nemo_ext.serving.guard import Guard, gone, metrics_page, refusal
from nemo_ext.serving.protocol import Chat, Completion
from nemo_ext.serving.text import Decoder, Splitter, TokenBytes

_MOST_BYTES = 64 << 20
_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in /v1/completions."""


class BadRequest(Exception):
    """Raised if a request is invalid; the message is returned to the client."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Served model, with its tokenizer and limits.

    Attributes:
        name: name of the model.
        engine: engine that runs the model.
        tokenizer: Hugging Face tokenizer.
        ends: token ids that end an answer.
        length: maximum number of tokens in prompt and answer together.
        defaults: mapping from sampling parameter to its default, from generation_config.json.
    """

    name: str
    engine: Engine
    tokenizer: Any
    ends: frozenset[int]
    length: int
    defaults: Mapping[str, float] = field(default_factory=dict)


class _Metrics:
    """Prometheus metrics of the server, with vLLM's names where vLLM has the same metrics."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        self.prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", registry=registry)
        self.generation = Counter("vllm:generation_tokens", "Generated tokens.", registry=registry)
        self.ended = Counter(
            "vllm:request_success", "Answers by finish reason.", ["finished_reason"], registry=registry
        )
        self.seconds = Histogram("vllm:e2e_request_latency_seconds", "Seconds per request.", registry=registry)
        for name, what, value in (
            ("running", "Sequences in the batch.", lambda: engine.running),
            ("waiting", "Sequences waiting for prefill.", lambda: engine.waiting),
        ):
            Gauge(f"vllm:num_requests_{name}", what, registry=registry).set_function(value)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Prompt, sampling parameters and stop strings of one requested answer."""

    prompt: Sequence[int]
    sampling: Sampling
    stop: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Piece of one answer.

    Attributes:
        index: number of the answer.
        text: new text that is final, as it cannot be part of a stop string.
        tokens: tokens since the previous piece, including echoed prompt tokens.
        end: why the answer ends; None if it continues.
    """

    index: int
    text: str
    tokens: Sequence[Token]
    end: str | None = None


class Api:
    """HTTP API of a served model."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.metrics = _Metrics(served.engine)
        self.model = {
            **{"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "nemo_ext"},
            "max_model_len": served.length,
        }

    def app(self, key: str | None) -> Starlette:
        """Create the application; every route except /health requires the key, if there is one."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={BadRequest: _refused, RuntimeError: _failed})
        app.add_middleware(Guard, key=key)
        return app

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.served.engine.failed is None else 503)

    async def _metrics(self, request: Request) -> Response:
        return metrics_page(self.metrics.registry)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.served.name:
            return refusal(404, f"unknown model {name!r}: this server has only {self.served.name!r}")
        return JSONResponse(self.model)

    async def _chat(self, request: Request) -> Response:
        given = await _read(request, Chat)
        if given.top_logprobs and not given.logprobs:
            raise BadRequest("top_logprobs requires logprobs=true")
        prompt = self._rendered(given)
        ids = self._ids(prompt, special=False)
        sampling = self._sampling(
            given,
            ids,
            given.max_completion_tokens or given.max_tokens or max(1, self.served.length - len(ids)),
            (given.top_logprobs or 0) if given.logprobs else None,
        )
        tools = () if given.tool_choice == "none" else given.tools or ()
        answers = _ChatAnswers(self, given, prompt.rstrip().endswith(OPEN), tools)
        return await self._respond(request, given, answers, [(ids, sampling)])

    async def _complete(self, request: Request) -> Response:
        given = await _read(request, Completion)
        prompts = [self._ids(prompt, special=True) for prompt in given.prompts()]
        most = _COMPLETION_TOKENS if given.max_tokens is None else given.max_tokens
        pairs = [(ids, self._sampling(given, ids, most, given.logprobs, echo=bool(given.echo))) for ids in prompts]
        if not pairs:
            raise BadRequest("prompt is empty: send at least one prompt")
        return await self._respond(request, given, _CompletionAnswers(self), pairs)

    @cached_property
    def _arguments_as_text(self) -> bool:
        tokenizer = self.served.tokenizer
        return isinstance(tokenizer.chat_template, str) and Template.of_tokenizer(tokenizer).takes_argument_text

    def _rendered(self, given: Chat) -> str:
        """Render a request's prompt with the tokenizer's chat template."""
        last = bool(given.continue_final_message)
        try:
            messages = template_messages(
                given.messages, "messages", unfinished=last, arguments_as_text=self._arguments_as_text
            )
        except ValueError as error:
            raise BadRequest(str(error)) from None
        more = dict(given.chat_template_kwargs or {})
        mode = given.enable_thinking
        if mode is not None and more.setdefault("enable_thinking", mode) is not mode:
            raise BadRequest("enable_thinking contradicts chat_template_kwargs: set only one of the two")
        if taken := {"tokenize", "return_tensors", "chat_template", "conversation"} & set(more):
            raise BadRequest(f"chat_template_kwargs must not contain {', '.join(sorted(taken))}: remove it")
        add = not last if given.add_generation_prompt is None else given.add_generation_prompt
        try:
            rendered: str = self.served.tokenizer.apply_chat_template(
                messages,
                tools=given.tools,
                tokenize=False,
                add_generation_prompt=add,
                continue_final_message=last,
                **more,
            )
        except Exception as error:  # templates may raise any exception
            raise BadRequest(
                f"the chat template rejects these messages ({type(error).__name__}: {error}): correct the messages, "
                "tools or chat_template_kwargs"
            ) from None
        return rendered

    def _ids(self, prompt: str | Sequence[int], *, special: bool) -> list[int]:
        if isinstance(prompt, str):
            return list(self.served.tokenizer(prompt, add_special_tokens=special)["input_ids"])
        size = self.served.engine.model.config.vocab_size
        if invalid := [token for token in prompt if not 0 <= token < size]:
            raise BadRequest(f"prompt: token ids must be from 0 to {size - 1}, not {invalid[0]}")
        return list(prompt)

    def _sampling(
        self, given: Chat | Completion, ids: Sequence[int], most: int, logprobs: int | None, *, echo: bool = False
    ) -> Sampling:
        if given.model not in (None, self.served.name):
            raise BadRequest(f"unknown model {given.model!r}: this server has only {self.served.name!r}")
        length, defaults = self.served.length, self.served.defaults
        if not ids:
            raise BadRequest("the prompt is empty: send at least one token")
        if len(ids) + most > length:
            raise BadRequest(
                f"the model's maximum context length is {length} tokens, but the prompt has {len(ids)} tokens and "
                f"max_tokens={most}: shorten the prompt, or lower max_tokens"
            )
        chosen = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")}
        chosen = {name: defaults.get(name) if value is None else value for name, value in chosen.items()}
        return Sampling(
            max_tokens=most,
            **{name: value for name, value in chosen.items() if value is not None and value != -1},
            seed=given.seed,
            stop=frozenset() if given.ignore_eos else self.served.ends,
            logprobs=logprobs,
            echo=echo,
        )

    async def _respond(
        self,
        request: Request,
        given: Chat | Completion,
        answers: "_Answers",
        prompts: Sequence[tuple[Sequence[int], Sampling]],
    ) -> Response:
        began = time.monotonic()
        asked = [
            _Asked(
                prompt=ids,
                sampling=sampling
                if sampling.seed is None
                else replace(sampling, seed=(sampling.seed + number) % 2**63),
                stop=given.stop,
            )
            for ids, sampling in prompts
            for number in range(given.n or 1)
        ]
        usage = _Usage(sum(len(ids) for ids, _ in prompts))
        pieces = self._counted(self._pieces(asked), usage, began)
        if given.stream:
            with_usage = bool((given.stream_options or {}).get("include_usage"))
            return StreamingResponse(
                answers.stream(pieces, usage if with_usage else None), media_type="text/event-stream"
            )
        collecting = asyncio.create_task(answers.whole(pieces, len(asked)))
        leaving = asyncio.create_task(gone(request))
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not collecting.done():  # the client has disconnected
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            return Response(status_code=499)
        return JSONResponse(answers.frame() | {"choices": collecting.result(), "usage": usage.as_json()})

    async def _counted(self, pieces: AsyncGenerator[_Piece], usage: "_Usage", began: float) -> AsyncGenerator[_Piece]:
        self.metrics.prompt.inc(usage.prompt)
        async with aclosing(pieces):
            async for piece in pieces:
                generated = sum(not token.prompt and token.id >= 0 for token in piece.tokens)
                usage.completion += generated
                self.metrics.generation.inc(generated)
                if piece.end is not None:
                    self.metrics.ended.labels(piece.end).inc()
                yield piece
        self.metrics.seconds.observe(time.monotonic() - began)

    async def _pieces(self, asked: Sequence[_Asked]) -> AsyncGenerator[_Piece]:
        """Yield the pieces of all answers as they arrive, interleaved."""
        out: asyncio.Queue[_Piece | BaseException] = asyncio.Queue()

        async def answer(index: int, request: _Asked) -> None:
            decoder = Decoder(self.served.tokenizer, request.stop)
            tokens: list[Token] = []
            try:
                async with aclosing(self.served.engine.generate(request.prompt, request.sampling)) as generated:
                    async for token in generated:
                        tokens.append(token)
                        if token.prompt:
                            continue
                        text = decoder.add(-1 if token.end == "stop" else token.id, last=token.end is not None)
                        end = "stop" if decoder.stopped else token.end
                        if text or end is not None:
                            out.put_nowait(_Piece(index=index, text=text, tokens=tokens, end=end))
                            tokens = []
                        if end is not None:
                            return
            except BaseException as error:
                out.put_nowait(error)
                raise

        running = [asyncio.create_task(answer(index, request)) for index, request in enumerate(asked)]
        unfinished = len(running)
        try:
            while unfinished:
                piece = await out.get()
                if isinstance(piece, BaseException):
                    raise piece
                unfinished -= piece.end is not None
                yield piece
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Converter of single tokens to bytes and text."""
        return TokenBytes(self.served.tokenizer)


@dataclass
class _Usage:
    prompt: int
    completion: int = 0

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


class _Answers:
    """Base class that converts answers to responses of the chat or the completion API."""

    kind, chunk, prefix = "", "", ""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._frame = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": api.served.name,
        }

    def frame(self) -> dict[str, Any]:
        """Return the fields that all responses have."""
        return {**self._frame, "object": self.kind}

    def part(self, piece: _Piece) -> list[dict[str, Any]]:
        """Convert a piece to the choices of its stream chunks, one choice per chunk."""
        raise NotImplementedError

    def choice(self, index: int, pieces: Sequence[_Piece]) -> dict[str, Any]:
        """Convert all pieces of an answer to a choice of the response."""
        raise NotImplementedError

    async def whole(self, pieces: AsyncGenerator[_Piece], count: int) -> list[dict[str, Any]]:
        """Collect all pieces of `count` answers, and return the choices of the response."""
        collected: list[list[_Piece]] = [[] for _ in range(count)]
        async with aclosing(pieces):
            async for piece in pieces:
                collected[piece.index].append(piece)
        return [self.choice(index, answer) for index, answer in enumerate(collected)]

    async def stream(self, pieces: AsyncGenerator[_Piece], usage: _Usage | None) -> AsyncGenerator[str]:
        """Yield server-sent events for the pieces, then the usage if given, then `[DONE]`."""
        frame = {**self._frame, "object": self.chunk}
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    for choice in self.part(piece):
                        yield _event(frame | {"choices": [choice]})
            except RuntimeError as error:
                yield _event({"error": {"message": str(error), "type": "server_error", "code": 500}})
                return
        if usage is not None:
            yield _event(frame | {"choices": [], "usage": usage.as_json()})
        yield "data: [DONE]\n\n"


class _ChatAnswers(_Answers):
    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, api: Api, given: Chat, thinking: bool, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(api)
        self._logprobs = bool(given.logprobs)
        self._splitters = [Splitter(thinking, tools) for _ in range(given.n or 1)]
        self._spoke: set[int] = set()
        self._unsaid: defaultdict[int, list[Token]] = defaultdict(list)

    def part(self, piece: _Piece) -> list[dict[str, Any]]:
        splitter = self._splitters[piece.index]
        deltas: list[dict[str, Any]] = []
        if piece.index not in self._spoke:
            self._spoke.add(piece.index)
            deltas.append({"role": "assistant", "content": ""})
        deltas += [{name: text} for name, text in splitter.add(piece.text, last=piece.end is not None)]
        if piece.end is not None:
            if splitter.calls:
                deltas.append({"tool_calls": splitter.calls})
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        self._unsaid[piece.index] += piece.tokens
        if choices and self._logprobs:
            choices[-1]["logprobs"] = {"content": self._measured(self._unsaid.pop(piece.index))}
        if piece.end is not None:
            choices[-1]["finish_reason"] = self._reason(piece)
        return choices

    def choice(self, index: int, pieces: Sequence[_Piece]) -> dict[str, Any]:
        splitter, texts = self._splitters[index], {"content": "", "reasoning_content": ""}
        for piece in pieces:
            for name, text in splitter.add(piece.text, last=piece.end is not None):
                texts[name] += text
        content, calls = texts["content"], splitter.calls
        message: dict[str, Any] = {"role": "assistant", "content": content.strip() or None if calls else content}
        if texts["reasoning_content"]:
            message["reasoning_content"] = texts["reasoning_content"].strip()
            message["content"] = message["content"] and message["content"].lstrip()
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        measured = self._measured([token for piece in pieces for token in piece.tokens])
        return {
            "index": index,
            "finish_reason": self._reason(pieces[-1]),
            "message": message,
            "logprobs": {"content": measured} if self._logprobs else None,
        }

    def _reason(self, piece: _Piece) -> str:
        return "tool_calls" if self._splitters[piece.index].calls else str(piece.end)

    def _measured(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [
            self._named(token.id, token.logprob) | {"top_logprobs": [self._named(*pair) for pair in token.top]}
            for token in tokens
            if token.logprob is not None
        ]

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        known = self.api.token_bytes
        return {"token": known.text(token), "logprob": logprob, "bytes": list(known(token))}


class _CompletionAnswers(_Answers):
    kind, chunk, prefix = "text_completion", "text_completion", "cmpl"

    def part(self, piece: _Piece) -> list[dict[str, Any]]:
        text = self._echoed(piece.tokens) + piece.text
        measured = self._measured(piece.tokens)
        return [{"index": piece.index, "text": text, "finish_reason": piece.end, "logprobs": measured}]

    def choice(self, index: int, pieces: Sequence[_Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self._echoed(piece.tokens) + piece.text for piece in pieces),
            "finish_reason": pieces[-1].end,
            "logprobs": self._measured([token for piece in pieces for token in piece.tokens]),
        }

    def _echoed(self, tokens: Sequence[Token]) -> str:
        prompt = [token.id for token in tokens if token.prompt]
        text: str = self.api.served.tokenizer.decode(prompt, clean_up_tokenization_spaces=False) if prompt else ""
        return text

    def _measured(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return OpenAI's `logprobs`: lists over tokens, with null for a prompt's first one; None if not requested."""
        shown = [token for token in tokens if token.id >= 0 and (token.prompt or token.logprob is not None)]
        if not any(token.logprob is not None for token in shown):
            return None
        known = self.api.token_bytes
        return {
            "tokens": [known.text(token.id) for token in shown],
            "token_logprobs": [token.logprob for token in shown],
            "top_logprobs": [
                None if token.logprob is None else {known.text(each): value for each, value in token.top}
                for token in shown
            ],
            "text_offset": known.offsets(token.id for token in shown),
        }


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _read[Kind: (Chat, Completion)](request: Request, kind: type[Kind]) -> Kind:
    """Read a request's body and validate it as `kind`; raise BadRequest if it is too large or invalid."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_BYTES:
            raise BadRequest(f"the request is larger than {_MOST_BYTES >> 20} MiB: send a smaller one")
    try:
        return kind.model_validate_json(bytes(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"][:1])
        known = "" if first["type"] != "extra_forbidden" else "; this server does not support the field"
        place = f" in the field {where}" if where else ""
        raise BadRequest(f"invalid request{place}: {first['msg']}{known}") from None


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(400, str(error))


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(500, str(error))
