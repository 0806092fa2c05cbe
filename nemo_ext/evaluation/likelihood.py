"""Log-likelihoods of texts from an endpoint, token for token equal to those of lm-evaluation-harness's `hf` back end.

Source: lm_eval/api/model.py (`TemplateLM._encode_pair`), lm_eval/models/huggingface.py, lm_eval/utils.py
(`get_rolling_token_windows`), version 0.4.13. There is one difference: an endpoint accepts prompts of at most
max_model_len - 1 tokens (vLLM always generates one more), whereas `hf` accepts max_length + 1 tokens (the last one is
only predicted). Only longer texts are affected: they match `hf` with max_length=max_model_len - 2.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.endpoint.client import Client
from nemo_ext.endpoint.echo import Echo
from nemo_ext.job.settings import Count

_LENGTH = 2048
"""Window length for a model of unknown length, as in lm-evaluation-harness."""
_ANY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-likelihood of a text, or the reason why there is none.

    Attributes:
        logprob: log-likelihood in nats; NaN if it could not be measured.
        greedy: whether every token of the text is the most likely one.
        bytes: number of UTF-8 bytes.
        tokens: number of tokens.
        problem: why there is no log-likelihood; "" if there is one.
    """

    logprob: float = math.nan
    greedy: bool = False
    bytes: int = 0
    tokens: int = 0
    problem: str = ""


class Likelihoods:
    """Measurement of log-likelihoods at an endpoint, through `/v1/completions` with `echo`.

    Without a tokenizer, texts are sent as strings: overlong texts fail, and texts without a context can be measured
    only if the endpoint prepends a token.

    Args:
        client: client of the endpoint, already entered with `async with`.
        tokenizer: Hugging Face folder with the model's tokenizer; None if unknown.
        max_length: the model's maximum number of tokens; if None, the endpoint is asked for it.

    Raises:
        ValueError: the folder has no readable tokenizer.
    """

    def __init__(self, client: Client, tokenizer: Path | None = None, max_length: Count | None = None) -> None:
        self.client, self._echo = client, Echo(client)
        self.tokens = None if tokenizer is None else Tokens(tokenizer)
        self._length, self._looked = max_length, max_length is not None
        self._looking = asyncio.Lock()

    async def continuations(self, context: str, choices: Sequence[str]) -> list[Scored]:
        """Measure the log-likelihood of each choice as a continuation of the context.

        Raises:
            ValueError: the endpoint rejects the API key.
            EndpointGone: the endpoint has not responded for longer than the client's patience.
        """
        before = context.rstrip()
        moved = context[len(before) :]  # spaces at the end of the context belong to the next token
        if self.tokens is not None:
            pairs = [self.tokens.pair(before, moved + choice) for choice in choices]
            most = (await self.length() or _ANY) - 1
            return list(
                await asyncio.gather(
                    *(self._pair(pair, most, choice) for pair, choice in zip(pairs, choices, strict=True))
                )
            )
        known = 0
        if before:
            counted = await self._echo.ask({"prompt": before, "max_tokens": 1, "temperature": 0})
            if counted.problem or not counted.prompt_tokens:
                problem = counted.problem or "the endpoint does not count the tokens of a prompt"
                return [Scored(problem=problem)] * len(choices)
            known = counted.prompt_tokens
        return list(
            await asyncio.gather(
                *(self._measured(before + moved + choice, None, choice, known=known) for choice in choices)
            )
        )

    async def rolling(self, text: str) -> Scored:
        """Measure the log-likelihood of a whole text, in windows of the model's length; each token is measured once.

        If the tokenizer adds a BOS token, that token is measured too, after another BOS token, as in
        lm-evaluation-harness.

        Raises:
            ValueError: the endpoint rejects the API key.
            EndpointGone: the endpoint has not responded for longer than the client's patience.
        """
        if not text:
            return Scored(logprob=0.0, greedy=True)
        if self.tokens is None:
            return await self._measured(text, None, text)
        windows = list(self.tokens.windows(text, most := (await self.length() or _LENGTH) - 1))
        parts = await asyncio.gather(*(self._pair(window, most, "") for window in windows))
        if problem := next((part.problem for part in parts if part.problem), ""):
            return Scored(problem=problem)
        return Scored(
            logprob=math.fsum(part.logprob for part in parts),
            greedy=all(part.greedy for part in parts),
            bytes=len(text.encode()),
            tokens=sum(part.tokens for part in parts),
        )

    async def length(self) -> int | None:
        """Return the model's maximum number of tokens, from `max_length` or the endpoint; None if unknown."""
        async with self._looking:
            if not self._looked and self.client.max_length is None:
                await self.client.check()
            self._looked = True
        return self._length or self.client.max_length

    async def _pair(self, pair: tuple[list[int], list[int]], most: int, text: str) -> Scored:
        """Measure the log-likelihood of a continuation, given its context.

        Args:
            pair: token ids of the context and of the continuation.
            most: maximum number of ids to send; the context is truncated from the left.
            text: the continuation as text, to count its bytes and to quote it in messages.
        """
        before, after = pair
        if not after:
            return Scored(problem=f"{_short(text)} adds no token to its context")
        if len(after) >= most:
            return Scored(
                problem=f"{_short(text)} has {len(after)} tokens, but the model accepts {most} with a context"
            )
        return await self._measured((before + after)[-most:], len(after), text)

    async def _measured(self, prompt: str | list[int], last: int | None, text: str, *, known: int = 0) -> Scored:
        """Measure the log-likelihood of the end of a prompt.

        Args:
            prompt: string or token ids.
            last: number of tokens to measure; if None, all after the first `known` tokens are measured.
            text: the measured part as text, to count its bytes and to quote it in messages.
            known: number of tokens that are not measured if `last` is None; with 0, the whole prompt is measured, which
                requires that the endpoint prepends a token.
        """
        answer = await self._echo.measured(prompt)
        if answer.problem:
            return Scored(problem=answer.problem)
        try:
            logprobs = answer.body["choices"][0]["logprobs"]
            size = len(prompt) if isinstance(prompt, list) else answer.prompt_tokens
            if size is None:
                return Scored(problem="the endpoint does not count the tokens of a prompt")
            values, tops = logprobs["token_logprobs"][:size], logprobs["top_logprobs"][:size]
            if last is None and not known:
                if _begins_with(prompt, logprobs["tokens"][0]):
                    return Scored(
                        problem="the first token of a text cannot be measured without the model's tokenizer: "
                        "set files_from to a folder that has it"
                    )
                known = 1
            start = size - last if last is not None else known
            if len(values) != size or len(tops) != size or start < 1:
                raise LookupError
            if start == size:
                return Scored(problem=f"{_short(text)} adds no token to its context")
            return Scored(
                logprob=math.fsum(values[start:]),
                greedy=all(value >= max(top.values()) for value, top in zip(values[start:], tops[start:], strict=True)),
                bytes=len(text.encode()),
                tokens=size - start,
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            return Scored(problem="the endpoint does not return log-probabilities of the prompt (echo, logprobs)")


class Tokens:
    """Tokenisation that matches lm-evaluation-harness's `hf` back end.

    Raises:
        ValueError: the tokenizer cannot be read, or has neither a BOS nor an EOS token.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PretrainedConfig

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            except AttributeError:
                # A model with custom code and scaled RoPE: transformers 5 cannot read its config without that code.
                self.tokenizer = AutoTokenizer.from_pretrained(folder, config=PretrainedConfig(), **options)
        except Exception as error:  # transformers may raise anything
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {reason}); set files_from to a "
                "folder with the model's tokenizer"
            ) from None
        self.tokenizer.model_max_length = 1 << 62  # texts are truncated by `Likelihoods`
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise ValueError(
                f"{folder}: its tokenizer has neither bos_token nor eos_token, and log-likelihoods require one; set "
                "one in tokenizer_config.json"
            )
        self.prefix: int = eos if bos is None else bos
        self._prefix_text: str = self.tokenizer.decode([self.prefix])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids, with the tokenizer's special tokens unless the text already starts with BOS."""
        special = special and not text.startswith(self._prefix_text)
        # Not add_special_tokens=True: the tokenizer's default applies.
        more = {} if special else {"add_special_tokens": False}
        return list(self.tokenizer.encode(text, **more))

    def pair(self, before: str, after: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a context and of its continuation; an empty context becomes the BOS token."""
        context = self.encode(before) if before else []
        if context:
            return context, self.encode(before + after)[len(context) :]
        ids = self.encode(after, special=False)
        return (ids[:1], ids[1:]) if ids[:1] == [self.prefix] else ([self.prefix], ids)

    def windows(self, text: str, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield windows of at most `most` token ids over a text, each as (context ids, ids to measure)."""
        ids = self.encode(text)
        step = most - 1
        yield [self.prefix], ids[:step]
        for start in range(step, len(ids), step):
            end = min(start + step, len(ids))
            # The last window has full length too: its context reaches back into the window before.
            yield ids[end - most : start], ids[start:end]


def _begins_with(text: str | list[int], token: str) -> bool:
    """Whether a text (or its token ids) can begin with a token, ignoring leading spaces; the token may end inside a
    character."""
    if not isinstance(text, str) or not token:
        return False
    if token.startswith("bytes:"):  # a partial character
        return text.encode().startswith(bytes(int(byte, 16) for byte in re.findall(r"\\x([0-9a-f]{2})", token)))
    return text.lstrip().startswith(token.lstrip().rstrip("\ufffd"))


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
