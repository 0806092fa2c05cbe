"""Block library and replace-one-block scores on small random models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from nemo_ext.architecture.blocks import Block
from nemo_ext.checkpoint.description import from_config
from nemo_ext.job.config import compose
from nemo_ext.puzzle.score_file import read_scores
from nemo_ext.puzzle.stages.library import Library, build, importance
from nemo_ext.puzzle.stages.score import score_blocks
from nemo_ext.puzzle.variants import Choices, Variant, variants


def calibration() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 384, (2, 16), generator=generator) for _ in range(3)]


def test_the_library_is_built_once_and_records_its_blocks(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("nemotron3_nano_tiny", 'model.pattern="M*E-"')
    library = Library(tmp_path)

    first = build(parent, description, by_block, library, calibration=calibration())
    again = build(parent, description, by_block, library, calibration=calibration())

    assert first == sum(len(each) - 2 for each in by_block)  # keep and no_op have no files
    assert again == 0
    assert (tmp_path / "block_004" / "ffn256.safetensors").is_file()
    (tmp_path / "block_004" / "ffn256.safetensors").rename(tmp_path / "block_004" / "linear.safetensors")
    with pytest.raises(ValueError, match=r"holds weights of -\{ffn=256\}, not of -\{linear\}"):
        library.read(next(v for v in by_block[3] if v.name == "linear"))


def test_importance_finds_idle_parts(opened: Callable[..., Any]) -> None:
    parent, description, _ = opened("nemotron3_nano_tiny", 'model.pattern="M*E-"')
    layers: Any = parent.layers
    with torch.no_grad():
        layers[3].mlp.linear_fc2.weight[:, 7] = 0.0
        layers[0].mixer.out_proj.weight[:, 16:32] = 0.0  # the second head
        layers[2].mlp.router.expert_bias[5] = -100.0  # never chosen
        layers[1].self_attention.linear_proj.weight[:, 32:64] = 0.0  # the second head
        mixer = layers[0].mixer
        mixer.in_proj.weight[2 * 256 + 3] = 0.0  # B of the fourth entry of the first group's state
        mixer.cp.get_conv1d_bias()[256 + 3] = 0.0

    measured = importance(parent, description, calibration())

    assert set(measured) == {0, 1, 2, 3}
    assert (measured[3].channels == 0).nonzero().flatten().tolist() == [7]
    assert (measured[0].heads == 0).nonzero().flatten().tolist() == [1]
    assert (measured[0].state == 0).nonzero().tolist() == [[0, 3]]
    assert (measured[1].heads == 0).nonzero().flatten().tolist() == [1]
    assert (measured[2].experts == 0).nonzero().flatten().tolist() == [5]


def test_initial_weights_are_shared_by_variants_that_choose_fewer_experts(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    parent, description, _ = opened("nemotron3_super_tiny", 'model.pattern="E"')
    few = Choices(experts=(), top_k=(1,), expert_ffn=(0.5,), ffn_multiple=8, combine=("E",), linear=False, no_op=False)
    by_block = variants(description.architecture, few)
    library = Library(tmp_path / "library", initial=True)

    assert build(parent, description, by_block, library, calibration=[]) == 3

    assert sorted(file.name for file in library.folder.rglob("*.safetensors")) == [
        "ffn64.safetensors",
        "topk.safetensors",
    ]
    narrow, both = (library.read(next(v for v in by_block[0] if v.name == name)) for name in ("ffn64", "topk1_ffn64"))
    assert narrow.keys() == both.keys() and all(torch.equal(narrow[name], both[name]) for name in narrow)
    layer = library.layer(parent, next(v for v in by_block[0] if v.name == "topk1"))
    assert layer.config.moe_router_topk == 1 and layer.config.moe_latent_size == 96
    wrong = by_block[0][-1]
    with pytest.raises(ValueError, match=r"ffn64\.safetensors holds weights of .*ffn=64.*, not of .*ffn=32"):
        library.read(Variant(0, wrong.name, replaced(wrong.block, ffn=32)))


def test_libraries_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Those had one file of initial weights per number of experts, and blocks without a latent width in their notes."""
    architecture = from_config(compose("describe", ["model=nemotron3_nano_tiny", "model.pattern=E"])).architecture
    ((few,),) = ([v for v in each if v.name == "topk1"] for each in variants(architecture, Choices(top_k=(1,))))
    file = tmp_path / "block_001" / "topk1.safetensors"
    file.parent.mkdir()
    written = str(few.block).replace(",latent=none", "")
    assert written != str(few.block)

    save_file({"weight": torch.ones(1)}, file, metadata={"block": written})

    for library in (Library(tmp_path, initial=True), Library(tmp_path)):
        assert library.has(few) and library.read(few)["weight"] == 1
        with pytest.raises(ValueError, match=r"topk1\.safetensors holds weights of .*, not of .*latent=8"):
            library.read(Variant(0, "topk1", replaced(few.block, latent=8)))


def replaced(block: Block, **values: int) -> Block:
    return Block(block.kind, tuple({**dict(block.values), **values}.items()))


def test_scores_match_the_whole_model(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-*-"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    tokens = torch.cat(calibration())

    layers: WeakSet[torch.nn.Module] = WeakSet()

    def layer_of(variant: Variant) -> Any:
        assert not layers, "one at a time"
        layer = library.layer(parent, variant)
        if layer is not None and variant.name != "keep":
            layers.add(layer)
        return layer

    scores = score_blocks(parent, by_block, layer_of, calibration(), tmp_path / "scores.jsonl", together=1)

    by_name = {(score.block, score.variant): score for score in scores}
    assert len(scores) == sum(map(len, by_block))
    with torch.no_grad():
        whole = parent.logits(tokens)
        for variant in (v for each in by_block for v in each):
            logits = parent.logits(tokens, {variant.number: library.layer(parent, variant)})
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
            p, q = (each[:, :-1].log_softmax(-1) for each in (whole, logits))
            score = by_name[variant.number + 1, variant.name]
            assert score.loss == pytest.approx(loss, rel=1e-5)
            assert score.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3, abs=1e-7)
    for number in range(4):
        kept = by_name[number + 1, "keep"]
        assert kept.kl == pytest.approx(0, abs=1e-7) and kept.cosine == pytest.approx(0, abs=1e-6)
        assert by_name[number + 1, "no_op"].kl > 1e-4


def test_only_blocks_after_a_variant_run_again(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-*"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    runs = [0] * len(parent.layers)

    def count(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[number] += 1

        return hook

    hooks = [layer.register_forward_hook(count(number)) for number, layer in enumerate(parent.layers)]
    score_blocks(parent, by_block, lambda v: library.layer(parent, v), calibration(), tmp_path / "scores.jsonl")
    for hook in hooks:
        hook.remove()

    # Once for the parent's pass, once to move on to the next block's inputs, and once per variant of an earlier block.
    changed = [len(each) - 1 for each in by_block]
    expected = [1 + (number < 2) + sum(changed[:number]) for number in range(3)]
    assert [each / len(calibration()) for each in runs] == expected


def test_scoring_resumes_after_a_kill_with_the_same_result(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-*"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    asked: list[str] = []

    def layer_of(variant: Any) -> Any:
        asked.append(f"{variant.number}{variant.name}")
        if len(asked) == 8:
            raise KeyboardInterrupt
        return library.layer(parent, variant)

    whole = score_blocks(parent, by_block, lambda v: library.layer(parent, v), calibration(), tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        score_blocks(parent, by_block, layer_of, calibration(), tmp_path / "scores.jsonl")
    done = read_scores(tmp_path / "scores.jsonl")
    with open(tmp_path / "scores.jsonl", "a") as file:
        file.write('{"block": 2, "vari')  # an incomplete line after a kill
    resumed = score_blocks(parent, by_block, layer_of, calibration(), tmp_path / "scores.jsonl")

    assert [score.block for score in done] == [1] * len(by_block[0])
    assert resumed == whole
    assert len(asked) == 8 + sum(map(len, by_block[1:])) and asked.count("0keep") == 1
    assert (tmp_path / "scores.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_scores_of_another_calibration_set_are_not_mixed(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, _, found = opened("llama_nemotron_tiny", 'model.pattern="-"')
    file = tmp_path / "scores.jsonl"
    keep = [[found[0][0]]]
    score_blocks(parent, keep, lambda v: parent.layers[v.number], calibration(), file)

    with pytest.raises(ValueError, match="has scores on 90 tokens, but the calibration set has 30"):
        score_blocks(parent, keep, lambda v: parent.layers[v.number], calibration()[:1], file)
    with pytest.raises(ValueError, match="calibration set is empty"):
        score_blocks(parent, keep, lambda v: parent.layers[v.number], [], file)
    file.write_text("nonsense\n" + json.dumps({"block": 1}) + "\n")
    with pytest.raises(ValueError, match=r"scores\.jsonl:1: expected a score"):
        read_scores(file)
