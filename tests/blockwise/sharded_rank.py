"""A rank of test_sharded.py: stages on parents that are complete on each rank and on parents distributed over ranks.

    torchrun --nproc-per-node 2 sharded_rank.py FOLDER

FOLDER/config.json is a training config; the results of each kind of parent are written to FOLDER/KIND.pt.
"""

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from nemo_ext.megatron.cpu import runtime

runtime.enable()

KINDS = ("whole", "shard", "offload")


def main(folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from nemo_ext.blockwise import data_parallel as ranks
    from nemo_ext.blockwise.sharded import SharedOut, open_parent
    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.megatron.session import build_model, data_parallel
    from nemo_ext.puzzle.configs import stage_config
    from nemo_ext.puzzle.fusion.dependency import measure_dependency
    from nemo_ext.puzzle.settings import Training
    from nemo_ext.puzzle.stages.distill import distill
    from nemo_ext.puzzle.stages.evaluate import forward_seconds, loss
    from nemo_ext.puzzle.stages.library import Library, build, importance
    from nemo_ext.puzzle.stages.score import score_blocks
    from nemo_ext.puzzle.variants import Choices, variants

    given = json.loads((folder / "config.json").read_text())
    description = from_config(given)
    choices = Choices(ffn=(0.5,), ffn_multiple=8, kv=(0.5,), experts=(0.5,), expert_ffn=(), mamba_heads=(0.5,))
    found = variants(description.architecture, choices)
    with data_parallel():
        config = stage_config(given, description, ranks.count())
        torch.manual_seed(0)
        (folder / "checkpoint").mkdir(exist_ok=True)
        dist_checkpointing.save(build_model(config)[0].sharded_state_dict(), str(folder / "checkpoint"))
        generator = torch.Generator().manual_seed(ranks.number())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokens = [torch.randint(0, 384, (2, 16), generator=generator).to(device) for _ in range(2)]
        for kind in KINDS:
            parent = open_parent(config, folder / "checkpoint", None if kind == "whole" else kind)
            assert bool(parent.shared) == (kind != "whole")
            own = folder / kind
            library, trained = Library(own / "initial"), Library(own / "trained")
            build(parent, description, found, library, calibration=tokens)
            training = Training(steps=3, batch=4, together=3)
            distill(parent, found, library, trained, lambda step: iter(tokens * 2), training)
            scores = score_blocks(parent, found, partial(trained.layer, parent), tokens, own / "scores.jsonl")
            states = parent.hidden(tokens[0]).detach()
            with (
                torch.no_grad(),
                patch.object(SharedOut, "_gather", autospec=True, side_effect=SharedOut._gather) as gather,
            ):
                assert len([*parent.each_hidden_from(1, [states] * 3)]) == 3
            assert gather.call_count == (0 if kind == "whole" else len(found) - 1), "each block once for all inputs"
            measured = importance(parent, description, tokens).items()
            seconds = forward_seconds([parent, parent], tokens[0])
            parts = [part for shared in parent.shared for part in shared.parts]
            made = {
                "scores": {f"{each.block} {each.variant}": [each.kl, each.loss, each.cosine] for each in scores},
                "importance": {n: [part for part in vars(each).values() if part is not None] for n, each in measured},
                "tensors": [parent.tensors(number) for number in range(len(found))],
                "dependency": measure_dependency(parent, tokens, own / "dependency.jsonl"),
                "loss": loss(parent, tokens),
                "rounds": [len(each) for each in seconds],
                "held": sum(each.numel() for each in (*parent.model.parameters(), *parts)),
                "outside": sum(
                    each.numel() for name, each in parent.model.named_parameters() if ".layers." not in name
                ),
            }
            if ranks.number() == 0:
                torch.save(made, folder / f"{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
