"""Batches for the stages: the sequences of each rank, and the loss over them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.token_batches import TokenBatches
from nemo_ext.job.config import compose
from nemo_ext.puzzle.stages import evaluate


@pytest.fixture(scope="module")
def sequences(megatron: None) -> Callable[..., TokenBatches]:
    @cache
    def make(split: Any) -> TokenBatches:
        config = compose(
            "train",
            [
                "run_dir=unused",
                "data=mock",
                "model=llama_nemotron_tiny",
                "precision=fp32",
                "megatron.seq_length=16",
                "megatron.micro_batch_size=1",
                "megatron.global_batch_size=1",
                "train.tokens=160",
            ],
        )
        return TokenBatches(config, split, 10, torch.device("cpu"))

    return make


def as_rank(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    monkeypatch.setattr(data_parallel, "number", lambda: number)
    monkeypatch.setattr(data_parallel, "count", lambda: count)


def test_ranks_divide_the_sequences_of_one(
    sequences: Callable[..., TokenBatches], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sequences("train")
    whole, first = data.batches(4), next(data.stream(3, 4))
    assert [tuple(batch.shape) for batch in whole] == [(4, 16), (4, 16), (2, 16)]
    assert len({tuple(row) for batch in whole for row in batch.tolist()}) == 10

    shares, streams = [], []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        shares.append(data.batches(4))
        streams.append(next(data.stream(3, 4)))

    assert torch.equal(torch.cat(streams), first)
    for share, expected in zip(shares, (whole[0::2], whole[1::2]), strict=True):
        assert all(torch.equal(batch, other) for batch, other in zip(share, expected, strict=True))


def test_training_and_validation_use_different_sequences(sequences: Callable[..., TokenBatches]) -> None:
    assert not torch.equal(sequences("train").batch(0, 4), sequences("valid").batch(0, 4))


def test_indivisible_batches_are_refused(
    sequences: Callable[..., TokenBatches], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sequences("train")
    as_rank(monkeypatch, 0, 4)
    with pytest.raises(ValueError, match="10 sequences in batches of 4 are too few for 4 ranks"):
        data.batches(4)
    as_rank(monkeypatch, 0, 3)
    with pytest.raises(ValueError, match="batches of 4 sequences cannot be split evenly over 3 ranks"):
        next(data.stream(0, 4))


def test_the_loss_is_the_mean_over_tokens_of_megatrons_logits(opened: Callable[..., Any]) -> None:
    parent, _, _ = opened("llama_nemotron_tiny", 'model.pattern="*-*-"')
    tokens = torch.randint(0, 384, (3, 12), generator=torch.Generator().manual_seed(0))

    def expected() -> float:
        places = torch.arange(12).expand(3, 12)
        with torch.no_grad():
            logits = parent.model(tokens, places, None)
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()

    # Batches of different sizes: each token has the same weight.
    assert evaluate.loss(parent, [tokens[:2], tokens[2:]]) == pytest.approx(expected(), rel=1e-5)
    without = evaluate.loss(parent, [tokens], {1: None})
    parent.model.decoder.layers[1].mlp.linear_fc2.weight.data.zero_()
    assert without == pytest.approx(expected(), rel=1e-5)
