"""The model in training behind an endpoint: all ranks run Megatron's own forward pass for the first one's engine.

There is no cache of keys and values: each step runs whole sequences, with padding after them, which causal attention
and Mamba do not see.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from nemo_ext.megatron.guard import here
from nemo_ext.serving.engine import Engine, Token, _Sequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_END, _IDLE, _RUN = range(3)
_SECONDS_IDLE = 5.0
"""Seconds after which ranks that have nothing to do hear so: collectives do not wait for ever."""
_MULTIPLE = 32
"""Lengths are multiples: products in FP8 want that, and kernels are not compiled for every length."""


class LiveModel:
    """A model in training, which all ranks run forward together.

    Args:
        chunks: the rank's parts of the model, as Megatron's trainer has them.
        vocabulary: number of ids; Megatron's rows beyond are padding.
        length: most tokens of a sequence.
        tokens: most tokens of a micro-batch, with padding.
    """

    def __init__(self, chunks: "Sequence[torch.nn.Module]", *, vocabulary: int, length: int, tokens: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        self.chunks, self.vocabulary, self.length, self.tokens = list(chunks), vocabulary, length, tokens
        self.config = SimpleNamespace(vocab_size=vocabulary)  # where a server looks for it
        self._shares = parallel_state.get_data_parallel_world_size()
        self._share = parallel_state.get_data_parallel_rank()
        self._writes = parallel_state.get_tensor_model_parallel_rank() == 0
        stages, tensor = parallel_state.get_pipeline_model_parallel_world_size(), get_model_config(self.chunks[0])
        self._stages, self._interleaved = stages, len(self.chunks) > 1
        self._multiple = _MULTIPLE * (tensor.tensor_model_parallel_size if tensor.sequence_parallel else 1)
        self._device = next(parameter.device for chunk in self.chunks for parameter in chunk.parameters())

    def __call__(
        self, sequences: Sequence[Sequence[int]], echoed: Sequence[bool], top: int
    ) -> "tuple[Tensor, Tensor | None]":
        """Runs sequences on all ranks; called on the first one, while the others `follow`.

        Args:
            sequences: tokens of each.
            echoed: whether a sequence's own tokens are measured too.
            top: number of most likely tokens that are told of each.

        Returns:
            Logits of each sequence's next token `[sequences, vocabulary]`, and None or what is measured of the tokens
            `[sequences, positions, 1 + 2 * top]`: the log-probability in nats of each from the second on, the most
            likely ones' log-probabilities, and their ids. Both in float32 on the CPU.
        """
        import torch

        longest = max(map(len, sequences))
        padded = max(longest, min(-(-longest // self._multiple) * self._multiple, self.length))
        rows = max(1, self.tokens // padded)  # of a micro-batch
        rows = min(rows, -(-len(sequences) // (self._shares * self._stages)))
        micro = -(-len(sequences) // (self._shares * rows))
        micro = -(-micro // self._stages) * self._stages if self._interleaved else micro
        asked = torch.zeros(self._shares * micro * rows, padded + 2, dtype=torch.long)
        asked[:, -1] = 1
        for row, (sequence, echo) in enumerate(zip(sequences, echoed, strict=True)):
            asked[row, : len(sequence)] = torch.tensor(sequence)
            asked[row, -2], asked[row, -1] = int(echo), len(sequence)
        self._say(_RUN, micro, rows, padded, min(top, self.vocabulary), int(any(echoed)))
        logits, measured = self._run(asked.to(self._device), micro, rows, min(top, self.vocabulary), any(echoed))
        count = len(sequences)
        return logits[:count].cpu(), None if measured is None else measured[:count].cpu()

    def follow(self) -> None:
        """Runs what the first rank is asked, until that is all; called on the others."""
        import torch

        while True:
            order, micro, rows, padded, top, echo = self._say()
            if order == _END:
                return
            if order == _RUN:
                asked = torch.empty(self._shares * micro * rows, padded + 2, dtype=torch.long, device=self._device)
                self._run(asked, micro, rows, top, bool(echo))

    def idle(self) -> None:
        """Tells the other ranks that there is nothing to do yet."""
        self._say(_IDLE)

    def end(self) -> None:
        """Tells the other ranks that this is all."""
        self._say(_END)

    def _say(self, *order: int) -> tuple[int, ...]:
        """The first rank's order, on every rank."""
        import torch

        here()
        said = torch.tensor([*order, *[0] * (6 - len(order))], device=self._device)
        torch.distributed.broadcast(said, 0)
        return tuple(said.tolist())

    def _run(self, asked: "Tensor", micro: int, rows: int, top: int, echo: bool) -> "tuple[Tensor, Tensor | None]":
        """One pass of `micro` micro-batches on every data-parallel rank; the first rank has the results."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        torch.distributed.broadcast(asked, 0)
        padded = asked.shape[1] - 2
        first = self._share * micro * rows
        logits = torch.zeros(len(asked), self.vocabulary, device=self._device)
        measured = torch.zeros(len(asked), padded, 1 + 2 * top, device=self._device) if echo else None

        def step(numbers: Iterator[int], chunk: "torch.nn.Module") -> "tuple[Tensor, Callable[..., None]]":
            place = first + next(numbers) * rows
            own = asked[place : place + rows]
            positions = torch.arange(padded, device=self._device).expand(rows, -1)
            output = chunk(own[:, :padded], positions, None)
            return output, partial(self._collect, own=own, place=place, logits=logits, measured=measured)

        iterators = [iter(range(micro)) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if self._interleaved else iterators[0],
            model=self.chunks,
            num_microbatches=micro,
            seq_length=padded,
            micro_batch_size=rows,
            decoder_seq_length=padded,
            forward_only=True,
            collect_non_loss_data=True,
        )
        for result in (logits, measured):
            if result is not None:
                torch.distributed.reduce(result, 0)  # each row is zero on all ranks but one
        return logits, measured

    def _collect(
        self,
        output: "Tensor",
        *,
        own: "Tensor",
        place: int,
        logits: "Tensor",
        measured: "Tensor | None",
        non_loss_data: bool,
    ) -> None:
        """Takes what is wanted of the logits `[rows, positions, part of the vocabulary]` of the last stage."""
        import torch
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gathered

        rows = torch.arange(len(own), device=self._device)
        following = gathered(output[rows, own[:, -1] - 1])
        if self._writes:
            logits[place : place + len(own)] = following[:, : self.vocabulary].float()
        for row, (echo, length) in enumerate(own[:, -2:].tolist()):
            if not echo or length < 2 or measured is None:
                continue
            each = gathered(output[row, : length - 1])
            if self._writes:
                logprobs = torch.log_softmax(each[:, : self.vocabulary].float(), -1)
                best = logprobs.topk((measured.shape[2] - 1) // 2)
                given = logprobs.gather(-1, own[row, 1:length, None])
                measured[place + row, 1:length] = torch.cat([given, best.values, best.indices.float()], -1)


class LiveEngine(Engine):
    """The engine of a model in training, on the first rank; its main thread runs it by `run`.

    Args:
        model: the model.
        max_batch: most sequences at a time.
        stopped: tells whether to leave off, as after a signal.
    """

    def __init__(self, model: LiveModel, *, max_batch: int = 64, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        super().__init__(model, max_batch=max_batch)

    def run(self) -> bool:
        """Answers what is asked until `close`; False if it left off before.

        Raises:
            BaseException: what the forward pass raised, where other ranks take part: they cannot be told.
        """
        import torch

        alone = torch.distributed.get_world_size() == 1
        try:
            while self._arrive():
                self._step()
        except BaseException as error:
            self._fail(error)
            if not (alone and isinstance(error, Exception)):
                raise
            return True  # who asked has been told
        self.model.end()
        self._fail(RuntimeError("training goes on"))
        return not self._stopped()

    def _begin(self) -> None:
        """It has no thread of its own."""

    def _arrive(self) -> bool:
        idle = not self._rows and not self._waiting
        while not self._stopped():
            try:
                sequence = self._arriving.get(block=idle, timeout=_SECONDS_IDLE)
            except queue.Empty:
                if not idle:
                    return True
                self.model.idle()
                continue
            if sequence is None:
                return False
            idle = False
            self._waiting.append(sequence)
        return False

    def _step(self) -> None:
        import torch

        self._waiting = [sequence for sequence in self._waiting if not sequence.dropped]
        self._keep([not row.dropped for row in self._rows])
        for row in self._rows:
            row.prompt = [*row.prompt, row.last]
        joining = self._joining()
        for row in joining:
            if row.sampling.seed is not None:
                row.generator = torch.Generator().manual_seed(row.sampling.seed)
        self._rows = [*self._rows, *joining]
        if not self._rows:
            return
        echoed = [row.sampling.echo and not row.made for row in self._rows]
        top = max((row.sampling.logprobs or 0 for row, echo in zip(self._rows, echoed, strict=True) if echo), default=0)
        with torch.no_grad():
            logits, measured = self.model([row.prompt for row in self._rows], echoed, top)
        for number, (row, echo) in enumerate(zip(self._rows, echoed, strict=True)):
            if echo and measured is not None:
                _give_echo(row, measured[number].tolist(), top)
        self._next(self._rows, logits)

    def _keep(self, kept: Sequence[bool]) -> None:
        self._rows = [row for row, stays in zip(self._rows, kept, strict=True) if stays]


def _give_echo(row: _Sequence, measured: Sequence[Sequence[float]], top: int) -> None:
    """Gives the prompt's tokens with what is measured of them."""
    most = row.sampling.logprobs
    tokens = [Token(row.prompt[0], prompt=True)]
    for token, (logprob, *best) in zip(row.prompt[1:], measured[1:], strict=False):
        pairs = tuple(zip(map(int, best[top:]), best[:top], strict=True))[: most or 0]
        tokens.append(Token(token, prompt=True) if most is None else Token(token, logprob, pairs, prompt=True))
    row.give(*tokens)
