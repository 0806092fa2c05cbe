"""Generation with transformers models and continuous batching: a sequence joins the batch after its prefill.

The engine supports all classes whose cache consists of transformers' cache layers for KV or recurrent states.
Sequences of different lengths share one right-aligned cache: shorter sequences are padded on the left, and
the attention mask hides the padding. If all layers keep all keys and values, common prefixes of prompts (a system
message, few-shot examples, the same prompt for several answers) are computed once and reused. One thread owns the
model; all other code uses `Engine.generate`.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

_GREEDY = 1e-5
"""Temperature below which decoding is greedy, as logits divided by a smaller number may not be finite."""
_PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens, including padding, in one forward pass."""
_LIKELY = 1024
"""Number of most likely tokens among which `top_p` is sought first."""
_COMMON = 16
"""Minimum length in tokens of a common prefix that is computed in a separate forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters for one answer.

    Attributes:
        max_tokens: maximum number of tokens in the answer; with 0, the prompt is only scored.
        temperature: sampling temperature; below 1e-5, decoding is greedy.
        top_p: probability mass of the most likely tokens that are sampled from.
        top_k: number of most likely tokens that are sampled from; 0 for all.
        seed: seed of sampling; None for a random seed.
        stop: ids of tokens that end an answer and are not part of it.
        logprobs: number of most likely tokens whose log-probabilities are returned at each position; if None, no
            log-probabilities are returned.
        echo: whether the prompt's tokens are returned too.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: frozenset[int] = frozenset()
    logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Token of an answer or of an echoed prompt.

    Attributes:
        id: token id.
        logprob: log-probability in nats, before temperature; None if not requested, and for a prompt's first token.
        top: ids and log-probabilities of the most likely tokens at this position.
        prompt: whether this is a prompt token.
        end: why the answer ends (stop, length), or None; with `stop`, the token is not part of the answer.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: bool = False
    end: str | None = None


@dataclass
class _Sequence:
    """State of an answer in progress."""

    prompt: Sequence[int]
    sampling: Sampling
    out: asyncio.Queue[Token | BaseException]
    loop: asyncio.AbstractEventLoop
    generator: "torch.Generator | None" = None
    last: int = -1
    length: int = 0
    """Number of the sequence's tokens in the cache."""
    made: int = 0
    dropped: bool = False

    def give(self, *tokens: Token | BaseException) -> None:
        def put() -> None:
            for token in tokens:
                self.out.put_nowait(token)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # the caller has closed its event loop
            self.dropped = True


class Engine:
    """Engine that answers many requests concurrently with one model.

    Args:
        model: causal language model, on its device.
        max_batch: maximum number of sequences in the batch.
    """

    def __init__(self, model: "PreTrainedModel", *, max_batch: int = 64) -> None:
        self.model: Any = model
        self.max_batch = max_batch
        self._arriving: queue.SimpleQueue[_Sequence | None] = queue.SimpleQueue()
        self._waiting: list[_Sequence] = []
        self._rows: list[_Sequence] = []
        self._cache: DynamicCache | None = None
        self._prefix: tuple[list[int], DynamicCache | None] = ([], None)
        self.failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._begin()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Token]:
        """Yield an answer's tokens as they are generated; leaving the iteration stops the generation.

        Raises:
            RuntimeError: the model has failed.
        """
        sequence = _Sequence(prompt, sampling, asyncio.Queue(), asyncio.get_running_loop())
        self._arriving.put(sequence)
        try:
            while True:
                if self.failed is not None:
                    raise RuntimeError(f"the engine has failed ({self.failed}): restart the server")
                token = await sequence.out.get()
                if isinstance(token, BaseException):
                    raise RuntimeError(f"the engine has failed ({token}): restart the server") from token
                yield token
                if token.end is not None:
                    return
        finally:
            sequence.dropped = True

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Number of sequences waiting for prefill."""
        return len(self._waiting)

    def close(self) -> None:
        """End the engine's thread."""
        self._arriving.put(None)
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        """Start the thread in which the engine runs; a subclass may run it elsewhere."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import torch

        try:
            with torch.inference_mode():
                while self._arrive():
                    self._step()
        except BaseException as error:  # reported to all callers, since the thread ends
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Report an error of the engine to all current and later callers of `generate`."""
        self.failed = error  # before the queue is emptied, so that later callers see it
        while not self._arriving.empty():
            if (sequence := self._arriving.get()) is not None:
                self._waiting.append(sequence)
        for sequence in (*self._rows, *self._waiting):
            sequence.give(error)
        self._rows, self._waiting = [], []

    def _arrive(self) -> bool:
        """Move new sequences to the waiting list, blocking if idle; return False once the engine closes."""
        idle = not self._rows and not self._waiting
        while True:
            try:
                sequence = self._arriving.get(block=idle)
            except queue.Empty:
                return True
            if sequence is None:
                return False
            idle = False
            self._waiting.append(sequence)

    def _step(self) -> None:
        """Run one step: a prefill if prompts are waiting and there is room, otherwise a decoding step."""
        self._waiting = [sequence for sequence in self._waiting if not sequence.dropped]
        self._keep([not row.dropped for row in self._rows])
        joining = self._joining()
        if joining:
            self._prefill(self._alike(joining))
        elif self._rows:
            self._decode()

    def _joining(self) -> list[_Sequence]:
        """Select the sequences to prefill next, which have similar lengths to limit padding."""
        room = self.max_batch - len(self._rows)
        if not self._waiting or room <= 0:
            return []
        first = self._waiting[0]
        longest = 0
        joining: list[_Sequence] = []
        near = sorted(self._waiting, key=lambda other: (abs(len(other.prompt) - len(first.prompt)), other is not first))
        for sequence in near[:room]:
            longest = max(longest, len(sequence.prompt))
            if joining and (
                longest * (len(joining) + 1) > _PREFILL_TOKENS or sequence.sampling.echo != first.sampling.echo
            ):
                continue
            joining.append(sequence)
        chosen = set(map(id, joining))
        self._waiting = [sequence for sequence in self._waiting if id(sequence) not in chosen]
        return joining

    def _alike(self, joining: list[_Sequence]) -> list[_Sequence]:
        """Select sequences to prefill together: the first one, and all whose prompts have a long common prefix with it.

        A prefix is long if it covers at least half of a prompt, as for several answers to one prompt. If the first
        shares no long prefix, all sequences that share none are selected. If the model cannot reuse prefixes, all
        sequences are selected. The rest wait for the next step.
        """
        if joining[0].sampling.echo or not self._splits:
            return joining
        groups: list[list[_Sequence]] = []
        for sequence in sorted(joining, key=lambda other: list(other.prompt)):
            least = max(_COMMON, len(sequence.prompt) // 2)
            if groups and _agreement(groups[-1][0].prompt, sequence.prompt) >= least:
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
        several = [set(map(id, group)) for group in groups if len(group) > 1]  # by id, as sequences are not hashable
        single = {id(group[0]) for group in groups if len(group) == 1}
        chosen = next((group for group in several if id(joining[0]) in group), single)
        self._waiting = [*(other for other in joining if id(other) not in chosen), *self._waiting]
        return [other for other in joining if id(other) in chosen]

    def _prefill(self, joining: list[_Sequence]) -> None:
        import torch

        echo = joining[0].sampling.echo
        common, cache = (0, new_cache(self.model)) if echo else self._common(joining)
        longest = max(len(sequence.prompt) for sequence in joining) - common
        ids = torch.zeros(len(joining), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(joining):
            rest = sequence.prompt[common:]
            ids[row, longest - len(rest) :] = torch.tensor(rest)
            mask[row, longest - len(rest) :] = 1
        before, self._rows = self._rows, [*self._rows, *joining]
        whole = torch.cat([torch.ones(len(joining), common, dtype=torch.long), mask], -1)
        positions = (common + mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, whole, positions, cache, every=echo)
        if common:
            pad_left(cache, common, longest - mask.sum(-1))
        if self._splits and longest > common and not echo:  # the new prefix is longer than the cached one
            row = int(mask.sum(-1).argmax())
            self._prefix = (list(joining[row].prompt), one_row(cache, row))
        if echo:
            for row, sequence in enumerate(joining):
                _give_prompt(sequence, logits[row, longest - len(sequence.prompt) :])
        for sequence in joining:
            sequence.length = len(sequence.prompt)
            if sequence.sampling.seed is not None:
                sequence.generator = torch.Generator().manual_seed(sequence.sampling.seed)
        self._cache = merged(self._cache, cache) if before and self._cache is not None else cache
        self._next(joining, logits[:, -1])

    def _common(self, joining: Sequence[_Sequence]) -> "tuple[int, DynamicCache]":
        """Return the length of the prompts' common prefix in the cache, and a cache that holds this prefix in each row.

        If several prompts share more than the cached prefix, the remainder is computed here. A prompt's last token is
        never part of the prefix, because its logits are needed.
        """
        import torch

        if not self._splits:
            return 0, new_cache(self.model)
        first, last = min(list(new.prompt) for new in joining), max(list(new.prompt) for new in joining)
        shared = first[: min(_agreement(first, last), *(len(new.prompt) - 1 for new in joining))]
        tokens, prefix = self._prefix
        known = _agreement(shared, tokens)
        if known < _COMMON:
            known, prefix = 0, None
        if len(joining) > 1 and len(shared) - known >= _COMMON:
            cache = new_cache(self.model) if prefix is None else repeated(prefix, known, 1, self.model)
            ids = torch.tensor([shared[known:]])
            self._forward(
                ids, torch.ones(1, len(shared)).long(), known + torch.arange(ids.shape[1])[None], cache, every=False
            )
            known, prefix = len(shared), cache
            self._prefix = (shared, one_row(cache, 0))
        if prefix is None:
            return 0, new_cache(self.model)
        return known, repeated(prefix, known, len(joining), self.model)

    @cached_property
    def _splits(self) -> bool:
        """True if a prompt can be computed in two parts with padding in between: no windows or recurrent states."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in DynamicCache(config=self.model.config).layers)

    def _decode(self) -> None:
        import torch

        width = max(row.length for row in self._rows) + 1
        ids = torch.tensor([[row.last] for row in self._rows])
        positions = torch.tensor([[row.length] for row in self._rows])
        mask = (torch.arange(width)[None] >= width - 1 - positions).long()
        logits = self._forward(ids, mask, positions, self._cache, every=False)
        for row in self._rows:
            row.length += 1
        self._next(self._rows, logits[:, -1])

    @cached_property
    def _cache_name(self) -> str:
        """Name of the model's cache argument, which transformers renamed in 5.24; code in checkpoints uses either."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def _forward(self, ids: "Tensor", mask: "Tensor", positions: "Tensor", cache: Any, *, every: bool) -> "Tensor":
        """Compute logits `[rows, positions, vocabulary]`, in float32 on the CPU, at every position or only the last."""
        device = self.model.device
        made = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=0 if every else 1,
            **{self._cache_name: cache},
        )
        logits: Tensor = made.logits.float().cpu()
        return logits

    def _next(self, rows: Sequence[_Sequence], logits: "Tensor") -> None:
        """Choose the next token of each row from logits `[rows, vocabulary]`; finished rows leave the batch."""
        import torch

        ended: set[int] = set()
        for row, scores in zip(rows, logits, strict=True):
            sampling = row.sampling
            if not sampling.max_tokens:
                row.give(Token(-1, end="stop"))
                ended.add(id(row))
                continue
            greedy = sampling.temperature < _GREEDY
            token = int(scores.argmax()) if greedy else draw(scores, sampling, row.generator)
            row.last = token
            row.made += 1
            end = "stop" if token in sampling.stop else "length" if row.made >= sampling.max_tokens else None
            if sampling.logprobs is None:
                row.give(Token(token, end=end))
            else:
                row.give(_measured(torch.log_softmax(scores, -1), token, sampling.logprobs, end=end))
            if end is not None:
                ended.add(id(row))
        self._keep([id(row) not in ended for row in self._rows])

    def _keep(self, kept: Sequence[bool]) -> None:
        """Remove from the batch all rows with False in `kept`, and from the cache any padding that no row needs."""
        import torch

        if all(kept):
            return
        before = max(row.length for row in self._rows)
        self._rows = [row for row, stays in zip(self._rows, kept, strict=True) if stays]
        if not self._rows:
            self._cache = None
            return
        assert self._cache is not None
        self._cache.reorder_cache(torch.tensor([place for place, stays in enumerate(kept) if stays]))
        cut_left(self._cache, before - max(row.length for row in self._rows))


def new_cache(model: "PreTrainedModel") -> "DynamicCache":
    """Create an empty cache that keeps all keys and values, even with sliding windows, which the mask implements.

    If layers dropped old tokens, their columns would not align with rows that join the batch later.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[place] = DynamicLayer()
    return cache


def repeated(cache: "DynamicCache", columns: int, rows: int, model: "PreTrainedModel") -> "DynamicCache":
    """Create a cache with `rows` copies of the first `columns` columns of a one-row cache."""
    copy = new_cache(model)
    for mine, theirs in zip(copy.layers, cache.layers, strict=True):
        if getattr(theirs, "keys", None) is not None:
            keys, values = (getattr(theirs, name)[..., :columns, :] for name in ("keys", "values"))
            mine.lazy_initialization(keys, values)
            mine.keys, mine.values = keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)
    return copy


def one_row(cache: "DynamicCache", row: int) -> "DynamicCache":
    """Copy one row of a cache; the row must not have padding."""
    from transformers import DynamicCache

    copy = DynamicCache()
    copy.layers = [type(layer)() for layer in cache.layers]
    for mine, theirs in zip(copy.layers, cache.layers, strict=True):
        if getattr(theirs, "keys", None) is not None:
            mine.keys, mine.values = (states[row : row + 1].clone() for states in (theirs.keys, theirs.values))
    return copy


def pad_left(cache: "DynamicCache", common: int, padding: "Tensor") -> None:
    """Move each row's padding from behind the first `common` columns to the start of the row.

    Args:
        common: number of columns before the padding.
        padding: width of each row's padding, `[rows]`.
    """
    import torch

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            column = torch.arange(layer.keys.shape[-2])[None]
            pad = padding[:, None]
            source = torch.where(
                column < pad, column + common, torch.where(column < pad + common, column - pad, column)
            )
            source = source.to(layer.keys.device)[:, None, :, None]
            layer.keys, layer.values = (
                torch.take_along_dim(states, source, -2) for states in (layer.keys, layer.values)
            )


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def merged(one: "DynamicCache", other: "DynamicCache") -> "DynamicCache":
    """Append the rows of `other` to `one`, and return `one`; the shorter cache is padded on the left."""
    import torch
    from torch.nn import functional

    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if getattr(mine, "keys", None) is not None:
            width = max(mine.keys.shape[-2], theirs.keys.shape[-2])
            for name in ("keys", "values"):
                pair = [getattr(layer, name) for layer in (mine, theirs)]
                padded = [functional.pad(states, (0, 0, width - states.shape[-2], 0)) for states in pair]
                setattr(mine, name, torch.cat(padded))
        for name in ("conv_states", "recurrent_states"):
            for key, state in (getattr(mine, name, None) or {}).items():
                if state is not None:
                    getattr(mine, name)[key] = torch.cat([state, getattr(theirs, name)[key]])
    return one


def cut_left(cache: "DynamicCache", columns: int) -> None:
    """Remove the first `columns` columns of keys and values from a cache."""
    if columns:
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[..., columns:, :], layer.values[..., columns:, :]


def draw(logits: "Tensor", sampling: Sampling, generator: "torch.Generator | None") -> int:
    """Sample a token from its logits `[vocabulary]`."""
    import torch

    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(sampling.top_k, len(scaled))).values[-1], -torch.inf)
    probabilities, places = torch.softmax(scaled, -1), None
    if sampling.top_p < 1:
        # Sorting a whole vocabulary takes longer than a small model's forward pass.
        probabilities, places = _largest(probabilities, sampling.top_p)
        # The token that crosses top_p is the last one kept.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    # torch.multinomial would draw a random number for each token of the vocabulary.
    bounds = probabilities.cumsum(-1, dtype=torch.float64)
    if not 0 < bounds[-1] < torch.inf:  # as for NaN
        raise ValueError("the model's logits are not finite; its weights may be damaged")
    number = torch.rand((), dtype=torch.float64, generator=generator)
    place = torch.searchsorted(bounds, bounds[-1] * number, right=True)
    return int(place if places is None else places[place])


def _largest(probabilities: "Tensor", share: float) -> "tuple[Tensor, Tensor]":
    """Return the largest probabilities in descending order and their tokens; they sum up to at least `share`."""
    largest = probabilities.topk(min(_LIKELY, len(probabilities)))
    if largest.values.sum() < share:
        return probabilities.sort(descending=True)
    return largest.values, largest.indices


def _give_prompt(sequence: _Sequence, logits: "Tensor") -> None:
    """Send the prompt's tokens to the caller, with log-probabilities from logits `[prompt, vocabulary]`."""
    import torch

    count, prompt = sequence.sampling.logprobs, sequence.prompt
    if count is None:
        sequence.give(*(Token(token, prompt=True) for token in prompt))
        return
    measured = torch.log_softmax(logits[:-1], -1)
    tokens = [Token(prompt[0], prompt=True)]
    tokens += [_measured(row, token, count, prompt=True) for row, token in zip(measured, prompt[1:], strict=True)]
    sequence.give(*tokens)


def _measured(logprobs: "Tensor", token: int, most: int, *, prompt: bool = False, end: str | None = None) -> Token:
    top = logprobs.topk(min(most, len(logprobs))) if most else None
    pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(token, float(logprobs[token]), pairs, prompt, end)
