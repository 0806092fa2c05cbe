"""Log-likelihoods of texts at an endpoint, token for token as lm-evaluation-harness's `hf` back end has them.

Source: lm_eval/api/model.py (`TemplateLM._encode_pair`), lm_eval/models/huggingface.py, lm_eval/utils.py
(`get_rolling_token_windows`), version 0.4.13. There is one difference: an endpoint takes a prompt of at most
max_model_len - 1 tokens (vLLM always makes one more), where `hf` takes max_length + 1 of which the last is only
predicted. Only texts longer than that differ, and they are equal with `hf` and max_length=max_model_len - 2.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.endpoint.failures import REFUSED
from nemo_ext.job.settings import Count

_LENGTH = 2048
"""Length of the windows for a model whose length no one tells, as in lm-evaluation-harness."""
_ANY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-likelihood of a text.

    Attributes:
        logprob: natural log-likelihood in nats; nan if there is none.
        greedy: whether each of its tokens is the most likely one.
        bytes: UTF-8 bytes of the text.
        tokens: number of its tokens.
        problem: why there is no log-likelihood; "" if there is one.
    """

    logprob: float = math.nan
    greedy: bool = False
    bytes: int = 0
    tokens: int = 0
    problem: str = ""


class Likelihoods:
    """Log-likelihoods from one endpoint, by `/v1/completions` with `echo`.

    Without the tokenizer, texts go out as they are: too long ones are problems, and texts without a context can only
    be measured where the endpoint puts a token before them by itself.

    Args:
        client: the endpoint's client, within `async with`.
        tokenizer: Hugging Face folder with the model's tokenizer; None if it is not known.
        max_length: most tokens that the model takes; None asks the endpoint.

    Raises:
        ValueError: the folder has no tokenizer that can be read.
    """

    def __init__(self, client: Client, tokenizer: Path | None = None, max_length: Count | None = None) -> None:
        self.client = client
        self.tokens = None if tokenizer is None else Tokens(tokenizer)
        self._length, self._looked = max_length, max_length is not None
        self._looking = asyncio.Lock()
        self._least = 0

    async def continuations(self, context: str, choices: Sequence[str]) -> list[Scored]:
        """Log-likelihood of each choice right after the context.

        Raises:
            ValueError: the endpoint refuses the key.
            EndpointGone: nobody has answered for longer than the client's patience.
        """
        moved = context[len(context.rstrip()) :]  # tokens begin with spaces, and do not end with them
        before = context.rstrip()
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
            counted = await self._ask({"prompt": before, "max_tokens": 1, "temperature": 0})
            if counted.problem or not counted.prompt_tokens:
                problem = counted.problem or "the endpoint does not count the tokens of a prompt"
                return [Scored(problem=problem)] * len(choices)
            known = counted.prompt_tokens
        return list(await asyncio.gather(*(self._text(before + moved + choice, known, choice) for choice in choices)))

    async def rolling(self, text: str) -> Scored:
        """Log-likelihood of a whole text, in windows of the model's length that do not overlap.

        A tokenizer that begins texts with a token of its own has that token measured too, after another one like it, as
        lm-evaluation-harness does.

        Raises:
            ValueError, EndpointGone: see `continuations`.
        """
        if not text:
            return Scored(logprob=0.0, greedy=True)
        if self.tokens is None:
            return await self._text(text, 0, text)
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
        """Most tokens that the model takes, as given or as the endpoint says; None if neither does."""
        async with self._looking:
            if not self._looked and self.client.max_length is None:
                await self.client.check()
            self._looked = True
        return self._length or self.client.max_length

    async def _pair(self, pair: tuple[list[int], list[int]], most: int, text: str) -> Scored:
        """Log-likelihood of a pair's second half."""
        before, after = pair
        if not after:
            return Scored(problem=f"{_short(text)} adds no token to its context")
        if len(after) >= most:
            return Scored(problem=f"{_short(text)} has {len(after)} tokens: the model takes {most} with a context")
        return await self._measured((before + after)[-most:], len(after), text)

    async def _text(self, text: str, known: int, part: str) -> Scored:
        """Log-likelihood of a text's tokens but for the first `known` ones; 0 is all that the text itself makes."""
        return await self._measured(text, None, part, known=known)

    async def _measured(self, prompt: str | list[int], last: int | None, text: str, *, known: int = 0) -> Scored:
        """Log-likelihood of a prompt's last tokens, or of those after the first known ones."""
        answer = await self._echoed(prompt)
        if answer.problem:
            return Scored(problem=answer.problem)
        try:
            found = answer.body["choices"][0]["logprobs"]
            size = len(prompt) if isinstance(prompt, list) else answer.prompt_tokens
            if size is None:
                return Scored(problem="the endpoint does not count the tokens of a prompt")
            values, tops = found["token_logprobs"][:size], found["top_logprobs"][:size]
            if last is None and not known:
                if _begins_with(prompt, found["tokens"][0]):
                    return Scored(
                        problem="the first token of a text has no log-likelihood without the model's tokenizer: "
                        "files_from=FOLDER"
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
            return Scored(problem="the endpoint gives no log-probabilities of a prompt (echo, logprobs)")

    async def _echoed(self, prompt: str | list[int]) -> Answer:
        """A prompt with its log-probabilities; some endpoints want to make a token after it."""
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
        least = self._least
        answer = await self._ask({**body, "max_tokens": least})
        if answer.status in (400, 422) and not least:
            again = await self._ask({**body, "max_tokens": 1})
            if not again.problem:
                self._least = 1
            return again
        return answer

    async def _ask(self, body: dict[str, Any]) -> Answer:
        answer = await self.client.ask(Request(body=body, path="completions"))
        if answer.status in REFUSED:
            raise ValueError(f"{self.client.address.url}: {answer.problem}")
        return answer


class Tokens:
    """Tokens of texts as lm-evaluation-harness's `hf` back end makes them.

    Args:
        folder: Hugging Face folder with the tokenizer.

    Raises:
        ValueError: it has none that can be read, or none with a token to begin texts with.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PretrainedConfig

        how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **how)
            except AttributeError:
                # A model of its own code with scaled RoPE: transformers 5 cannot read its config without that code.
                self.tokenizer = AutoTokenizer.from_pretrained(folder, config=PretrainedConfig(), **how)
        except Exception as error:  # transformers raises whatever it likes
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"{folder}: no tokenizer that can be read ({type(error).__name__}: {said})") from None
        self.tokenizer.model_max_length = 1 << 62  # texts are cut here
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise ValueError(f"{folder}: its tokenizer names neither bos_token nor eos_token: nothing can be measured")
        self.prefix: int = eos if bos is None else bos
        self._prefix_text: str = self.tokenizer.decode([self.prefix])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; with the tokenizer's own special tokens around it, unless the text brings the first one."""
        special = special and not text.startswith(self._prefix_text)
        # None, not True: as the tokenizer does by itself.
        more = {} if special else {"add_special_tokens": False}
        return list(self.tokenizer.encode(text, **more))

    def pair(self, before: str, after: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of what follows; the context is not empty."""
        context = self.encode(before) if before else []
        if context:
            return context, self.encode(before + after)[len(context) :]
        ids = self.encode(after, special=False)
        return (ids[:1], ids[1:]) if ids[:1] == [self.prefix] else ([self.prefix], ids)

    def windows(self, text: str, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """Pairs of a context and the ids after it, of at most so many ids together, which make up the text."""
        ids = self.encode(text)
        step = most - 1
        yield [self.prefix], ids[:step]
        for start in range(step, len(ids), step):
            end = min(start + step, len(ids))
            # The last window is as long as the others: its context is what came before it.
            yield ids[end - most : start], ids[start:end]


def _begins_with(text: str | list[int], token: str) -> bool:
    """True if the text's first token may be this one; a cut character counts, and a space before the text does not."""
    if not isinstance(text, str) or not token:
        return False
    if token.startswith("bytes:"):  # a part of a character
        return text.encode().startswith(bytes(int(byte, 16) for byte in re.findall(r"\\x([0-9a-f]{2})", token)))
    return text.lstrip().startswith(token.lstrip().rstrip("\ufffd"))


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
