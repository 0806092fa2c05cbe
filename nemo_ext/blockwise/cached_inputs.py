"""Cache of one block's inputs for all batches, so that a measurement runs only from that block on."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from nemo_ext.blockwise.parent import Parent


class CachedInputs:
    """Inputs of the current block, and the hidden states before the output layer, for every batch.

    Args:
        parent: the model.
        batches: this rank's batches of tokens, each `[batch, seq]`.
    """

    def __init__(self, parent: Parent, batches: Sequence[Tensor]) -> None:
        self.parent, self.batches = parent, batches
        self.number = 0
        self.inputs: list[Tensor] = []
        self.last: list[Tensor] = []

    def at(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield, for each batch, its tokens `[batch, seq]`, the input of the block, and the input of the output layer.

        Both inputs are `[seq, batch, hidden]`, and the block's number counts from 0. Moving to a later block runs the
        blocks in between; moving to an earlier block runs the whole model.
        """
        if not self.inputs or number < self.number:
            self.inputs, self.last = [], []
            for tokens in self.batches:
                with self.parent.recorded([number]) as record:
                    self.last.append(self.parent.hidden(tokens))
                self.inputs.append(record[0][0])
            self.number = number
        for block in range(self.number, number):
            layer = self.parent.layers[block]
            with self.parent.gathered(block):
                for place, hidden in enumerate(self.inputs):  # one at a time, to avoid holding all batches twice
                    self.inputs[place] = self.parent.block_output(block, hidden, layer)
        self.number = number
        return zip(self.batches, self.inputs, self.last, strict=True)
