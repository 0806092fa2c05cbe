"""Inference engine for a model in training: all ranks run Megatron's forward pass for an engine on rank 0.

There is no KV cache: each step runs the complete sequences. They are right-padded, which does not affect causal
attention or Mamba.
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
"""Interval in seconds between broadcasts to idle ranks, which keep their collectives from timing out."""
_MULTIPLE = 32
"""Sequences are padded to a multiple of this length: FP8 GEMMs require it, and fewer lengths compile fewer kernels."""


class LiveModel:
    """Forward pass of a model in training, run by all ranks together.

    Args:
        vocabulary: number of token ids, without the padding rows of Megatron's vocabulary.
        tokens: maximum tokens per microbatch, including padding.
    """

    def __init__(self, chunks: "Sequence[torch.nn.Module]", *, vocabulary: int, length: int, tokens: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        self.chunks, self.vocabulary, self.length, self.tokens = list(chunks), vocabulary, length, tokens
        self.config = SimpleNamespace(vocab_size=vocabulary)  # read by the server
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
        """Run sequences on all ranks; called on rank 0 while the other ranks run `follow`.

        Args:
            echoed: for each sequence, whether to measure its own tokens too.
            top: number of most likely tokens to return per position.

        Returns:
            Logits of each sequence's next token, `[sequences, vocabulary]`; and measurements of the sequences' tokens,
            `[sequences, positions, 1 + 2 * top]`, or None if none are echoed. A measurement is the log-probability in
            nats of a token (from the second on), followed by the log-probabilities and the ids of the most likely
            tokens at its position. Both are in float32 on the CPU.
        """
        import torch

        longest = max(map(len, sequences))
        padded = max(longest, min(-(-longest // self._multiple) * self._multiple, self.length))
        rows = max(1, self.tokens // padded)  # per microbatch
        rows = min(rows, -(-len(sequences) // (self._shares * self._stages)))
        micro = -(-len(sequences) // (self._shares * rows))
        micro = -(-micro // self._stages) * self._stages if self._interleaved else micro
        batch = torch.zeros(self._shares * micro * rows, padded + 2, dtype=torch.long)
        batch[:, -1] = 1
        for row, (sequence, echo) in enumerate(zip(sequences, echoed, strict=True)):
            batch[row, : len(sequence)] = torch.tensor(sequence)
            batch[row, -2], batch[row, -1] = int(echo), len(sequence)
        self._broadcast(_RUN, micro, rows, padded, min(top, self.vocabulary), int(any(echoed)))
        logits, measured = self._run(batch.to(self._device), micro, rows, min(top, self.vocabulary), any(echoed))
        count = len(sequences)
        return logits[:count].cpu(), None if measured is None else measured[:count].cpu()

    def follow(self) -> None:
        """Run the forward passes that rank 0 requests, until it calls `end`; called on the other ranks."""
        import torch

        while True:
            order, micro, rows, padded, top, echo = self._broadcast()
            if order == _END:
                return
            if order == _RUN:
                batch = torch.empty(self._shares * micro * rows, padded + 2, dtype=torch.long, device=self._device)
                self._run(batch, micro, rows, top, bool(echo))

    def idle(self) -> None:
        """Tell the other ranks to keep waiting, so that their collectives do not time out."""
        self._broadcast(_IDLE)

    def end(self) -> None:
        """End `follow` on the other ranks."""
        self._broadcast(_END)

    def _broadcast(self, *order: int) -> tuple[int, ...]:
        """Broadcast an order of up to six integers from rank 0; return it, padded with zeros, on every rank."""
        import torch

        here()
        message = torch.tensor([*order, *[0] * (6 - len(order))], device=self._device)
        torch.distributed.broadcast(message, 0)
        return tuple(message.tolist())

    def _run(self, batch: "Tensor", micro: int, rows: int, top: int, echo: bool) -> "tuple[Tensor, Tensor | None]":
        """Run a batch on all ranks; return the next-token logits and, with `echo`, the tokens' log-probabilities.

        Only rank 0 has complete results, in the form that `__call__` documents.

        Args:
            batch: a row per sequence: its right-padded token ids, whether log-probabilities of its tokens are needed (0
                or 1), and its length, `[sequences, positions + 2]`; only rank 0's values are used.
            micro: number of microbatches per data-parallel rank.
            rows: number of sequences per microbatch.
            top: number of most likely tokens to return per position.
            echo: whether any sequence needs log-probabilities of its tokens.
        """
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        torch.distributed.broadcast(batch, 0)
        padded = batch.shape[1] - 2
        first = self._share * micro * rows
        logits = torch.zeros(len(batch), self.vocabulary, device=self._device)
        measured = torch.zeros(len(batch), padded, 1 + 2 * top, device=self._device) if echo else None

        def step(numbers: Iterator[int], chunk: "torch.nn.Module") -> "tuple[Tensor, Callable[..., None]]":
            place = first + next(numbers) * rows
            microbatch = batch[place : place + rows]
            positions = torch.arange(padded, device=self._device).expand(rows, -1)
            output = chunk(microbatch[:, :padded], positions, None)
            return output, partial(self._collect, microbatch=microbatch, place=place, logits=logits, measured=measured)

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
        microbatch: "Tensor",
        place: int,
        logits: "Tensor",
        measured: "Tensor | None",
        non_loss_data: bool,
    ) -> None:
        """Write a microbatch's results to `logits` and `measured`, the results of `_run`.

        Args:
            output: the last stage's logits, `[rows, positions, vocabulary / tensor-parallel size]`.
            microbatch: the microbatch's rows of `_run`'s batch.
            place: index of its first row in the batch.
            logits: logits of each sequence's next token, `[batch rows, vocabulary]`.
            measured: measurements of the sequences' tokens, as in `__call__`; None if none are requested.
            non_loss_data: passed by Megatron, and unused.
        """
        import torch
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

        rows = torch.arange(len(microbatch), device=self._device)
        following = gather(output[rows, microbatch[:, -1] - 1])
        if self._writes:
            logits[place : place + len(microbatch)] = following[:, : self.vocabulary].float()
        for row, (echo, length) in enumerate(microbatch[:, -2:].tolist()):
            if not echo or length < 2 or measured is None:
                continue
            echoed = gather(output[row, : length - 1])
            if self._writes:
                logprobs = torch.log_softmax(echoed[:, : self.vocabulary].float(), -1)
                best = logprobs.topk((measured.shape[2] - 1) // 2)
                actual = logprobs.gather(-1, microbatch[row, 1:length, None])
                measured[place + row, 1:length] = torch.cat([actual, best.values, best.indices.float()], -1)


class LiveEngine(Engine):
    """Engine on rank 0 for a model in training; `run` runs it in the main thread.

    Args:
        max_batch: maximum number of concurrent sequences.
        stopped: function that returns whether to stop early, for example after a signal.
    """

    def __init__(self, model: LiveModel, *, max_batch: int = 64, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        super().__init__(model, max_batch=max_batch)

    def run(self) -> bool:
        """Process requests until `close` is called; return False if stopped early.

        Raises:
            BaseException: the forward pass failed, and other ranks exist, which cannot recover from this.
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
            return True  # clients have received the error
        self.model.end()
        self._fail(RuntimeError("the evaluation has ended, and training continues"))
        return not self._stopped()

    def _begin(self) -> None:
        """Do nothing: no thread is needed, as `run` is called in the main thread."""

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
        self._rows = [row for row, keep in zip(self._rows, kept, strict=True) if keep]


def _give_echo(row: _Sequence, measured: Sequence[Sequence[float]], top: int) -> None:
    """Send a prompt's tokens to the client, with log-probabilities if requested.

    `measured` holds measurements from `LiveModel`, each with `top` most likely tokens.
    """
    most = row.sampling.logprobs
    tokens = [Token(row.prompt[0], prompt=True)]
    for token, (logprob, *best) in zip(row.prompt[1:], measured[1:], strict=False):
        pairs = tuple(zip(map(int, best[top:]), best[:top], strict=True))[: most or 0]
        tokens.append(Token(token, prompt=True) if most is None else Token(token, logprob, pairs, prompt=True))
    row.give(*tokens)
