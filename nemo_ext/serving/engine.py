"""Generation with transformers' models, batched while it runs: a sequence joins the others after its prompt.

Works with every class whose cache is made of transformers' layers of keys and values or of recurrent states. Sequences
of different lengths share one cache that is aligned at its end: shorter ones have padding before them, which the
attention mask hides. What prompts begin with in common (a system message, solved examples, the same prompt for several
answers) is read once and kept for the next ones, where every layer keeps all keys and values. One thread owns the
model; all else talks to it through `Engine.generate`.
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
"""Temperature below which the most likely token is taken: logits divided by less may not be finite."""
_PREFILL_TOKENS = 8192
"""Most tokens of prompts, with padding, in one forward pass."""
_COMMON = 16
"""Fewest common tokens that are worth a forward pass of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_tokens: most tokens of the answer; 0 only scores the prompt.
        temperature: below 1e-5 the most likely token is taken.
        top_p: share of the probability that tokens are drawn from.
        top_k: number of tokens that are drawn from; 0 for all.
        seed: seed of the draws; None for any.
        stop: ids that end an answer, which they are not part of.
        logprobs: number of most likely tokens whose log-probabilities are given; None for no log-probabilities.
        echo: whether those of the prompt's tokens are wanted too.
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
    """One token of an answer or of an echoed prompt.

    Attributes:
        id: the token.
        logprob: its log-probability in nats, before temperature; None if not asked for, and for a prompt's first token.
        top: ids and log-probabilities of the most likely tokens in its place.
        prompt: True if it is the prompt's.
        end: why the answer ends with it (stop, length); None if it goes on. At `stop` the token is not part of it.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: bool = False
    end: str | None = None


@dataclass
class _Sequence:
    """One answer in work."""

    prompt: Sequence[int]
    sampling: Sampling
    out: asyncio.Queue[Token | BaseException]
    loop: asyncio.AbstractEventLoop
    generator: "torch.Generator | None" = None
    last: int = -1
    length: int = 0
    """Tokens in the cache."""
    made: int = 0
    dropped: bool = False

    def give(self, *tokens: Token | BaseException) -> None:
        def put() -> None:
            for token in tokens:
                self.out.put_nowait(token)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # who asked has closed the loop
            self.dropped = True


class Engine:
    """A model that answers many requests at a time.

    Args:
        model: causal language model, on its device.
        max_batch: most sequences at a time.
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
        """Tokens of an answer as they come; leaving the iteration stops it.

        Raises:
            RuntimeError: the model has failed.
        """
        sequence = _Sequence(prompt, sampling, asyncio.Queue(), asyncio.get_running_loop())
        self._arriving.put(sequence)
        try:
            while True:
                if self.failed is not None:
                    raise RuntimeError(f"the engine has failed: {self.failed}")
                token = await sequence.out.get()
                if isinstance(token, BaseException):
                    raise RuntimeError(f"the engine has failed: {token}") from token
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
        """Number of sequences whose prompts are not read yet."""
        return len(self._waiting)

    def close(self) -> None:
        """End the thread."""
        self._arriving.put(None)
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import torch

        try:
            with torch.inference_mode():
                while self._arrive():
                    self._step()
        except BaseException as error:  # a thread's last words
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tells all who wait, and who come later."""
        self.failed = error  # before the queue is emptied: who comes later sees it
        while not self._arriving.empty():
            if (sequence := self._arriving.get()) is not None:
                self._waiting.append(sequence)
        for sequence in (*self._rows, *self._waiting):
            sequence.give(error)
        self._rows, self._waiting = [], []

    def _arrive(self) -> bool:
        """Takes in what has arrived, waiting if there is nothing else to do; False at the end."""
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
        """One forward pass: of prompts that wait, if there is room, or of the next token of all sequences."""
        self._waiting = [sequence for sequence in self._waiting if not sequence.dropped]
        self._keep([not row.dropped for row in self._rows])
        joining = self._joining()
        if joining:
            self._prefill(self._alike(joining))
        elif self._rows:
            self._decode()

    def _joining(self) -> list[_Sequence]:
        """Sequences whose prompts are read next, of similar lengths so that little is padding."""
        room = self.max_batch - len(self._rows)
        if not self._waiting or room <= 0:
            return []
        first = self._waiting[0]
        longest = 0
        joining: list[_Sequence] = []
        near = sorted(self._waiting, key=lambda each: (abs(len(each.prompt) - len(first.prompt)), each is not first))
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
        """Sequences to prefill now: the group that shares at least half of the first prompt, as answers to a prompt do.

        If the first prompt has no group, all sequences without a group are returned. The rest wait for the next step.
        """
        if joining[0].sampling.echo or not self._splits:
            return joining
        groups: list[list[_Sequence]] = []
        for sequence in sorted(joining, key=lambda each: list(each.prompt)):
            least = max(_COMMON, len(sequence.prompt) // 2)
            if groups and _agreement(groups[-1][0].prompt, sequence.prompt) >= least:
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
        several = [set(map(id, group)) for group in groups if len(group) > 1]  # a sequence has no hash
        single = {id(group[0]) for group in groups if len(group) == 1}
        chosen = next((group for group in several if id(joining[0]) in group), single)
        self._waiting = [*(each for each in joining if id(each) not in chosen), *self._waiting]
        return [each for each in joining if id(each) in chosen]

    def _prefill(self, joining: list[_Sequence]) -> None:
        import torch

        echo = joining[0].sampling.echo
        common, cache = (0, new_cache(self.model)) if echo else self._common(joining)
        longest = max(len(sequence.prompt) for sequence in joining) - common
        ids = torch.zeros(len(joining), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(joining):
            own = sequence.prompt[common:]
            ids[row, longest - len(own) :] = torch.tensor(own)
            mask[row, longest - len(own) :] = 1
        before, self._rows = self._rows, [*self._rows, *joining]
        whole = torch.cat([torch.ones(len(joining), common, dtype=torch.long), mask], -1)
        positions = (common + mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, whole, positions, cache, every=echo)
        if common:
            pad_left(cache, common, longest - mask.sum(-1))
        if self._splits and longest > common and not echo:  # what was read is worth more than what is kept
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
        """Number of tokens that all prompts begin with and that are read already, and a cache with them in each row.

        What several prompts share beyond what is kept is read here. The last token of a prompt is never part of it, as
        its logits are wanted.
        """
        import torch

        if not self._splits:
            return 0, new_cache(self.model)
        first, last = min(list(each.prompt) for each in joining), max(list(each.prompt) for each in joining)
        shared = first[: min(_agreement(first, last), *(len(each.prompt) - 1 for each in joining))]
        tokens, kept = self._prefix
        known = _agreement(shared, tokens)
        if known < _COMMON:
            known, kept = 0, None
        if len(joining) > 1 and len(shared) - known >= _COMMON:
            cache = new_cache(self.model) if kept is None else repeated(kept, known, 1, self.model)
            ids = torch.tensor([shared[known:]])
            self._forward(
                ids, torch.ones(1, len(shared)).long(), known + torch.arange(ids.shape[1])[None], cache, every=False
            )
            known, kept = len(shared), cache
            self._prefix = (shared, one_row(cache, 0))
        if kept is None:
            return 0, new_cache(self.model)
        return known, repeated(kept, known, len(joining), self.model)

    @cached_property
    def _splits(self) -> bool:
        """True if a prompt may be read in two parts with padding between them: no window, no recurrent state."""
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
        """The model's argument for the cache: transformers renamed it in 5.24, code beside a checkpoint has either."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def _forward(self, ids: "Tensor", mask: "Tensor", positions: "Tensor", cache: Any, *, every: bool) -> "Tensor":
        """Logits `[rows, positions, vocabulary]` in float32 on the CPU, of the last position or of every one."""
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
        """Chooses the next token of rows by their logits `[rows, vocabulary]`; those that end leave the batch."""
        import torch

        greedy = logits.argmax(-1).tolist()
        ended: set[int] = set()
        for row, own, best in zip(rows, logits, greedy, strict=True):
            given = row.sampling
            if not given.max_tokens:
                row.give(Token(-1, end="stop"))
                ended.add(id(row))
                continue
            token = best if given.temperature < _GREEDY else draw(own, given, row.generator)
            row.last = token
            row.made += 1
            end = "stop" if token in given.stop else "length" if row.made >= given.max_tokens else None
            if given.logprobs is None:
                row.give(Token(token, end=end))
            else:
                row.give(_measured(torch.log_softmax(own, -1), token, given.logprobs, end=end))
            if end is not None:
                ended.add(id(row))
        self._keep([id(row) not in ended for row in self._rows])

    def _keep(self, kept: Sequence[bool]) -> None:
        """Takes the other rows out of the batch, and padding that no row needs any longer out of the cache."""
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
    """An empty cache that keeps all keys and values, of sliding windows too: their mask does what the window does.

    Rows that join later would not fit into layers that have already forgotten.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from nemo_ext.serving.cache import RoomyLayer

    cache = DynamicCache(config=model.config)
    for place, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[place] = RoomyLayer()
    return cache


def repeated(cache: "DynamicCache", columns: int, rows: int, model: "PreTrainedModel") -> "DynamicCache":
    """A new cache whose rows all have the first columns of a cache of one row."""
    made = new_cache(model)
    for mine, theirs in zip(made.layers, cache.layers, strict=True):
        if getattr(theirs, "keys", None) is not None:
            keys, values = (getattr(theirs, name)[..., :columns, :] for name in ("keys", "values"))
            mine.lazy_initialization(keys, values)
            mine.keys, mine.values = keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)
    return made


def one_row(cache: "DynamicCache", row: int) -> "DynamicCache":
    """A copy of a row that has no padding."""
    from transformers import DynamicCache

    made = DynamicCache()
    made.layers = [type(layer)() for layer in cache.layers]
    for mine, theirs in zip(made.layers, cache.layers, strict=True):
        if getattr(theirs, "keys", None) is not None:
            mine.keys, mine.values = (each[row : row + 1].clone() for each in (theirs.keys, theirs.values))
    return made


def pad_left(cache: "DynamicCache", common: int, padding: "Tensor") -> None:
    """Moves each row's padding `[rows]`, which lies behind the common columns, before them."""
    import torch

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            column = torch.arange(layer.keys.shape[-2])[None]
            pad = padding[:, None]
            source = torch.where(
                column < pad, column + common, torch.where(column < pad + common, column - pad, column)
            )
            source = source.to(layer.keys.device)[:, None, :, None]
            layer.keys, layer.values = (torch.take_along_dim(each, source, -2) for each in (layer.keys, layer.values))


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def merged(one: "DynamicCache", other: "DynamicCache") -> "DynamicCache":
    """`one` with the rows of `other` after its own; the shorter of the two gets padding before its keys and values."""
    import torch
    from torch.nn import functional

    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if getattr(mine, "keys", None) is not None:
            width = max(mine.keys.shape[-2], theirs.keys.shape[-2])
            for name in ("keys", "values"):
                pair = [getattr(layer, name) for layer in (mine, theirs)]
                padded = [functional.pad(each, (0, 0, width - each.shape[-2], 0)) for each in pair]
                setattr(mine, name, torch.cat(padded))
        for name in ("conv_states", "recurrent_states"):
            for key, state in (getattr(mine, name, None) or {}).items():
                if state is not None:
                    getattr(mine, name)[key] = torch.cat([state, getattr(theirs, name)[key]])
    return one


def cut_left(cache: "DynamicCache", columns: int) -> None:
    """Takes the first columns of keys and values away."""
    if columns:
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[..., columns:, :], layer.values[..., columns:, :]


def draw(logits: "Tensor", given: Sampling, generator: "torch.Generator | None") -> int:
    """A token by its logits `[vocabulary]`."""
    import torch

    scaled = logits / given.temperature
    if given.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(given.top_k, len(scaled))).values[-1], -torch.inf)
    probabilities = torch.softmax(scaled, -1)
    if given.top_p < 1:
        ordered, places = probabilities.sort(descending=True)
        # The token that crosses the share is the last one that stays.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= given.top_p, 0)
        return int(places[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _give_prompt(sequence: _Sequence, logits: "Tensor") -> None:
    """Gives the prompt's tokens with their log-probabilities, by logits `[prompt, vocabulary]`."""
    import torch

    given, prompt = sequence.sampling, sequence.prompt
    if given.logprobs is None:
        sequence.give(*(Token(token, prompt=True) for token in prompt))
        return
    measured = torch.log_softmax(logits[:-1], -1)
    tokens = [Token(prompt[0], prompt=True)]
    tokens += [
        _measured(each, token, given.logprobs, prompt=True) for each, token in zip(measured, prompt[1:], strict=True)
    ]
    sequence.give(*tokens)


def _measured(logprobs: "Tensor", token: int, most: int, *, prompt: bool = False, end: str | None = None) -> Token:
    top = logprobs.topk(min(most, len(logprobs))) if most else None
    pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(token, float(logprobs[token]), pairs, prompt, end)
