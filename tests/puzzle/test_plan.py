"""Total work of stages, compared with counts by hand."""

from dataclasses import replace

import pytest

from nemo_ext.architecture import cost
from nemo_ext.architecture.gpus import GPUS
from nemo_ext.checkpoint.description import from_config
from nemo_ext.job.config import compose
from nemo_ext.puzzle.plan import REACHED, StageWork, stage_work
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.variants import variants


def test_every_pass_of_the_parent_is_counted() -> None:
    words = ["data=mock", "run_dir=unused", "puzzle.variants.ffn=[0.5]", "puzzle.variants.kv=[]", "puzzle.fsdp=shard"]
    words += ["puzzle.variants.linear=false", "puzzle.calibration={sequences: 8, batch: 2}"]
    words += ["puzzle.distill={steps: 10, batch: 4, together: 3}"]
    config = compose("puzzle", words)
    architecture, chosen = from_config(config).architecture, settings(config["puzzle"])
    found = variants(architecture, chosen.variants)
    assert architecture.pattern.blocks[0].kind == "*" and [len(each) for each in found[:2]] == [2, 3]
    pairs = len(found) // 2
    attention, ffn = (cost.block_forward_flops_per_token(architecture, n, seq_length=64) for n in (1, 2))
    head = cost.head_forward_flops_per_token(architecture)

    library, distill, score = stage_work(architecture, found, chosen, seq_length=64, ranks=2)
    kept = replace(chosen, distill=replace(chosen.distill, inputs="there", save_interval=4))
    _, once, _ = stage_work(architecture, found, kept, seq_length=64, ranks=2)

    parent = pairs * (attention + ffn)
    assert library.flops == pytest.approx(8 * 64 * parent)
    # Groups of three FFNs: the parent is run up to its 3rd, 6th, ... pair and its last one.
    runs = sum(min(last, pairs) for last in range(3, pairs + 3, 3))
    assert distill.flops == pytest.approx(10 * 4 * 64 * (runs * (attention + ffn) + 3 * pairs * ffn / 2))
    assert once.flops == pytest.approx(10 * 4 * 64 * pairs * (attention + ffn + 3 * ffn / 2))
    inputs = 4 * 64 * architecture.hidden_size * 2  # per step; all groups but the last write inputs; three checkpoints
    states = 3 * 3 * 4 * pairs * cost.block_parameters(architecture, 2).total / 2
    assert once.passing_bytes == pytest.approx(10 * inputs * 2 * (-(-pairs // 3) - 1) + states, rel=0.01)
    assert (once.held_bytes, distill.held_bytes) == (inputs * (10 + 4), 0)
    passes = parent  # for block inputs and the last hidden states
    for number in range(2 * pairs):
        later = [attention, ffn] * pairs
        own = [ffn, ffn / 2, 0] if number % 2 else [attention, 0]
        passes += later[number] + head + sum(each + sum(later[number + 1 :]) + head for each in own)
    assert score.flops == pytest.approx(8 * 64 * passes)
    each = 2 * cost.block_parameters(architecture, 2).total
    assert library.written_bytes == distill.written_bytes == pytest.approx(pairs * each / 2, rel=0.01)
    blocks = pairs * (each + 2 * cost.block_parameters(architecture, 1).total)
    assert library.gathered_bytes == pytest.approx(blocks / 2 * (2 + 1))  # two batches per rank, and each block once
    # FP32 gradients one way, BF16 weights the other, for FFNs of half the width.
    sent = 10 * (4 + 2) / 2 * pairs * each / 2
    assert once.gathered_bytes == pytest.approx((10 * blocks + sent) / 2, rel=0.01)


def test_hours_include_computation_and_communication() -> None:
    gpu = GPUS["H100-80GB"]
    work = StageWork(
        stage="score",
        flops=8 * 3600 * gpu.flops,
        gathered_bytes=3600 * gpu.nvlink,
        host_bytes=3600 * gpu.host,
        written_bytes=0.0,
    )
    assert work.hours(gpu, 8) == pytest.approx(3 / REACHED)
    # Eight adapters of a node are slower than NVLink.
    assert work.hours(gpu, 32, 4) == pytest.approx((0.25 + gpu.nvlink / (8 * gpu.network) + 1) / REACHED)
