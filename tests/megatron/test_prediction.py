"""Multi-token prediction: sizes of its blocks, its losses and gradients against plain torch, and resuming."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.start import model_of_start
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.job.job import invoke
from nemo_ext.megatron.commands import TRAIN
from nemo_ext.megatron.report import write_report

Train = Callable[..., list[dict[str, Any]]]
PATTERN = "ME{ffn=64}*-/*{heads=4,kv=2}E{experts=4,ffn=96}M/*{heads=4,kv=2}E{experts=4,ffn=96}M"
"""Two depths, whose blocks 1 and 2 have other values than the main blocks 1 and 2."""
PIPELINE = ("megatron.pipeline_model_parallel_size=2", "launcher.nproc_per_node=2")
CONTEXT = ("megatron.context_parallel_size=2", "launcher.nproc_per_node=2", "model.backend=transformer_engine")
FULL = ("megatron.recompute_granularity=full", "megatron.recompute_method=uniform")
LATENT = ("+megatron.moe_latent_size=48",)
WORDS = ["run_dir=unused", "data=mock", f"model.pattern={PATTERN}"]


def rms_norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:, 1:], torch.zeros_like(tensor[:, :1])], dim=1)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_model_has_the_parameters_that_the_cost_model_counts(megatron: None, repeated: bool) -> None:
    from nemo_ext.megatron.session import build_model

    config = compose("train", [*WORDS, f"megatron.mtp_use_repeated_layer={str(repeated).lower()}"])

    model, _ = build_model(config)

    assert sum(p.numel() for p in model.parameters()) == total_params(Architecture.from_config(config))
    assert len(model.mtp.layers) == (1 if repeated else 2)
    depth = model.mtp.layers[0].mtp_model_layer.layers
    assert [depth[0].config.num_attention_heads, depth[1].config.num_moe_experts] == [4, 4]
    assert [depth[1].config.moe_ffn_hidden_size, model.decoder.layers[1].config.moe_ffn_hidden_size] == [96, 64]


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_plain_torch(megatron: None, packed: bool) -> None:
    """On the tokens that the mask keeps, also where sequences are packed, beyond whose ends nothing is predicted."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from nemo_ext.megatron.forward_step import forward_step
    from nemo_ext.megatron.packed import BOUNDS
    from nemo_ext.megatron.session import build_model

    depths = "/*{heads=4,kv=2}-/*{heads=4,kv=2}-"
    model, _ = build_model(compose("train", ["run_dir=unused", "data=mock", f"model.pattern=*-{depths}"]))
    model.train()
    ids = torch.randint(0, 257, (1 if packed else 2, 49), generator=torch.Generator().manual_seed(3))
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:].contiguous(), "loss_mask": torch.ones(len(ids), 48)}
    batch["loss_mask"][0, 10:16] = 0
    batch["position_ids"] = torch.arange(48).expand_as(batch["tokens"])
    bounds = [0, 20, 48]
    if packed:
        batch[BOUNDS] = torch.tensor([bounds], dtype=torch.int32)
    names = ("tokens", "labels", "loss_mask")
    parts = list(pairwise(bounds)) if packed else [(0, 48)]
    sequences = [tuple(batch[name][row : row + 1, i:j] for name in names) for row in range(len(ids)) for i, j in parts]
    MTPLossLoggingHelper.tracker.clear()
    output, loss_of = forward_step(iter([batch]), model)
    loss, tokens, _ = loss_of(output)
    (loss / tokens).backward()
    logged = MTPLossLoggingHelper.tracker.pop("loss_values").tolist()
    MTPLossLoggingHelper.tracker.clear()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    table = model.embedding.word_embeddings.weight
    sums, counts = [torch.zeros(()) for _ in range(3)], [0.0] * 3

    def add(number: int, hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> None:
        logits = (hidden @ model.output_layer.weight.T).transpose(0, 1)
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        sums[number] = sums[number] + (nats * mask.flatten()).sum()
        counts[number] += float(mask.sum())

    for following, labels, mask in sequences:
        embedded = torch.nn.functional.embedding(following, table).transpose(0, 1)
        hidden = model.decoder(hidden_states=embedded, attention_mask=None)
        add(0, hidden, labels, mask)
        for number, depth in enumerate(model.mtp.layers, start=1):
            following, labels, mask = rolled(following), rolled(labels), rolled(mask)
            embedded = torch.nn.functional.embedding(following, table).transpose(0, 1)
            joined = torch.cat([rms_norm(embedded, depth.enorm), rms_norm(hidden, depth.hnorm)], dim=-1)
            hidden = joined @ depth.eh_proj.weight.T
            for layer in depth.mtp_model_layer.layers:
                hidden, _ = layer(hidden_states=hidden, attention_mask=None)
            hidden = rms_norm(hidden, depth.final_layernorm)
            add(number, hidden, labels, mask)
    main, *predicted = (total / count for total, count in zip(sums, counts, strict=True))
    (main + sum(0.1 / 2 * loss for loss in predicted)).backward()  # Megatron's default weight, over two depths

    assert logged == pytest.approx([loss.item() for loss in predicted], rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_run_logs_the_loss_of_each_depth_and_resumes(tmp_path: Path, train_ranks: Train) -> None:
    words = ("model.pattern=ME*-/*E{experts=4}/*E{experts=4}", "megatron.mtp_loss_scaling_factor=0.3")

    whole = train_ranks(tmp_path / "whole", *words)
    train_ranks(tmp_path / "parts", *words, "megatron.exit_interval=5")
    parts = train_ranks(tmp_path / "parts", *words)

    assert whole[-1]["mtp_1_loss"] < whole[0]["mtp_1_loss"]
    for key in ("loss", "mtp_1_loss", "mtp_2_loss"):
        assert [line[key] for line in parts][-5:] == [line[key] for line in whole][-5:], key
    report = write_report(tmp_path / "whole").read_text()
    assert f"loss of MTP depth 2, last step | {whole[-1]['mtp_2_loss']:.4f}" in report
    depths = f"MTP {whole[-1]['mtp_1_loss']:.3f}, {whole[-1]['mtp_2_loss']:.3f}"
    assert TRAIN.figures is not None
    assert invoke(TRAIN.figures, tmp_path / "whole").text.endswith(depths)  # shown by `status`


FROZEN = ("train.mtp_only=true", "megatron.pretrained_checkpoint=/nowhere")
HEALING = ("train.mtp_only=true", "train.new_mtp=/*E{experts=4}/*E{experts=4}", "megatron.mtp_loss_scaling_factor=0.3")


def healed(start: Path, *words: str) -> tuple[str, ...]:
    """Words of a run that adds depths to the model of another run, as `Run.from_config` changes its config."""
    start_words = (*HEALING, f"megatron.pretrained_checkpoint={start / run_directory.CHECKPOINTS}", *words)
    pattern = model_of_start(compose("train", ["run_dir=unused", "data=mock", *start_words]))["model"]["pattern"]
    return (*start_words, f"model.pattern={pattern}")


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint, and the names of the optimizer's, without values."""
    reader = TorchDistReader(run_dir / run_directory.CHECKPOINTS / f"iter_{step:07d}")
    return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.parametrize(
    "ranks", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor", "pipeline"))]
)
def test_only_new_depths_are_trained(single: Path, tmp_path: Path, train_ranks: Train, ranks: str) -> None:
    """The main model keeps its weights and expert biases bit by bit, and has no optimizer state."""
    layout = {
        "": (),
        "tensor": ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"),
        "pipeline": ("megatron.pipeline_model_parallel_size=2",),
    }[ranks]
    lines = train_ranks(tmp_path, *healed(single, *layout), ranks=2 if layout else 1)

    before, after = tensors(single, 10), tensors(tmp_path, 10)
    depths = {name for name in after if name.startswith("mtp.")}
    assert after.keys() - before.keys() == depths and depths
    assert any("expert_bias" in name for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert lines[-1]["mtp_1_loss"] < lines[0]["mtp_1_loss"] - 0.1
    stored = FileSystemReader(str(tmp_path / run_directory.CHECKPOINTS / "iter_0000010")).read_metadata()
    states = [name for name in stored.state_dict_metadata if "exp_avg" in name]
    assert states and all(".mtp." in name for name in states)


@pytest.mark.slow
def test_a_run_with_a_frozen_main_model_resumes(single: Path, tmp_path: Path, train_ranks: Train) -> None:
    words = healed(single, "megatron.use_distributed_optimizer=true")

    whole = train_ranks(tmp_path / "whole", *words)
    train_ranks(tmp_path / "parts", *words, "megatron.exit_interval=5")
    parts = train_ranks(tmp_path / "parts", *words)

    for key in ("step", "loss", "mtp_1_loss", "mtp_2_loss", "grad_norm"):
        assert [line[key] for line in parts][-5:] == [line[key] for line in whole][-5:], key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.pattern=ME*-/*G",), "multi-token prediction: blocks \\['G'\\]"),
        (("model.pattern=M*-/*E", "model.norm_placement=output"), "multi-token prediction: norm_placement=output"),
        (("model.pattern=ME*-", "megatron.mtp_use_repeated_layer=true"), "requires multi-token prediction"),
        (("model.pattern=M*|*-/*E", *PIPELINE), "pipeline rank 0 has no MoE block"),
        (("model.pattern=M*-/*{window=8}-", *CONTEXT), "multi-token prediction: block 1 .* a window of 8"),
        (("model.pattern=ME*-", *LATENT, "megatron.moe_shared_expert_overlap=true"), "moe_shared_expert_overlap"),
        (("model.pattern=ME*-", *LATENT, "megatron.disable_bias_linear=false"), "disable_bias_linear=true"),
        (("model.pattern=ME*-", "train.mtp_only=true"), "train.mtp_only=true requires multi-token prediction"),
        (("model.pattern=ME*-/*E", "train.mtp_only=true"), "set megatron.pretrained_checkpoint to a trained one"),
        (("model.pattern=ME*-/*E", *FROZEN, "stability.z_loss=1e-5"), "stability.z_loss=1e-05 cannot be combined"),
        (("model.pattern=ME*-/*E", *FROZEN, "distillation.teacher=/nowhere"), "distillation.teacher=/nowhere cannot"),
        (("model.pattern=ME*-/*E", *FULL, "megatron.recompute_num_layers=2"), "recompute_num_layers=2: .* only with 1"),
        (("model.pattern=ME*-/*E{topk=9}",), "multi-token prediction: block 2 .* topk=9 is more than the 8 experts"),
        (
            ("model.pattern=ME*-/*E", "megatron.mtp_num_layers=3"),
            "mtp_num_layers.* in model.pattern",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: tuple[str, ...], message: str) -> None:
    from nemo_ext.megatron.check import check

    with pytest.raises(ValueError, match=message):
        check(compose("train", ["run_dir=unused", "data=mock", *words]))


def test_modules_that_only_transformer_engine_recomputes_are_refused_on_the_local_back_end() -> None:
    from nemo_ext.megatron.check import check_machine

    words = ("megatron.recompute_granularity=selective", "megatron.recompute_modules=[moe,moe_act]")
    with pytest.raises(ValueError, match="recompute_modules: moe_act requires"):
        check_machine(compose("train", ["run_dir=unused", "data=mock", "model.backend=local", *words]))
