"""A rank of test_distill.py: variants trained by `distill`, and by AdamW with whole states on every rank.

    torchrun --nproc-per-node 2 distill_rank.py FOLDER

FOLDER/config.json is a training config. Weights of each way are written to FOLDER/WAY, the blocks that ran to
done.json.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nemo_ext.megatron.cpu import runtime

runtime.enable()

STEPS = 7
FREE = {"steps": STEPS, "batch": 4, "clip": 1e9}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the collectives in the context."""
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce"):
            call = getattr(torch.distributed, name)

            def count(*arguments: Any, name: str = name, call: Any = call, **named: Any) -> Any:
                calls[name] += 1
                return call(*arguments, **named)

            stack.enter_context(patch.object(torch.distributed, name, count))
        yield calls


def main(folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from nemo_ext.blockwise import data_parallel as ranks
    from nemo_ext.blockwise.sharded import open_parent
    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.megatron.session import build_model, data_parallel, take_tensors
    from nemo_ext.puzzle.configs import stage_config
    from nemo_ext.puzzle.settings import Training
    from nemo_ext.puzzle.stages.block_inputs import BlockInputs
    from nemo_ext.puzzle.stages.distill import _decay, distill, trainable
    from nemo_ext.puzzle.stages.library import Library, build
    from nemo_ext.puzzle.variants import Choices, variants

    given = json.loads((folder / "config.json").read_text())
    description = from_config(given)
    choices = Choices(
        ffn=(0.5, 0.25), ffn_multiple=8, kv=(), experts=(0.5,), expert_ffn=(), mamba_heads=(0.5,), linear=False
    )
    found = variants(description.architecture, choices)

    def batches(start: int) -> Iterator[torch.Tensor]:
        for step in itertools.count(start):
            yield torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(2 * step + ranks.number()))

    def whole_states(parent: Any, variant: Any, clip: float) -> None:
        layer: Any = library.layer(parent, variant)
        weights = list(layer.parameters())
        masters = [each.detach().float().requires_grad_() for each in weights]
        optimizer = torch.optim.AdamW(masters, lr=Training().lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay(STEPS))
        for tokens in itertools.islice(batches(0), STEPS):
            with torch.no_grad(), parent.recorded([variant.number]) as record:
                parent.hidden(tokens)
            hidden, output = record[0]
            scale = ranks.summed((output - hidden).float().square().mean()) / ranks.count()
            error = (parent.block_output(variant.number, hidden, layer) - output).float().square().mean() / scale
            gradients = torch.autograd.grad(error, weights, allow_unused=True, materialize_grads=True)
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = ranks.summed(gradient.float()) / ranks.count()
            torch.nn.utils.clip_grad_norm_(masters, clip)
            optimizer.step()
            schedule.step()
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.detach())
        if ranks.number() == 0:
            prefix = f"decoder.layers.{variant.number}."
            tensors = {name.removeprefix(prefix): each for name, each in take_tensors(layer, prefix).items()}
            Library(folder / f"plain_{clip:g}").write(variant, tensors)

    with data_parallel():
        config = stage_config(given, description, ranks.count())
        torch.manual_seed(0)
        (folder / "checkpoint").mkdir(exist_ok=True)
        dist_checkpointing.save(build_model(config)[0].sharded_state_dict(), str(folder / "checkpoint"))
        parent = open_parent(config, folder / "checkpoint")
        library = Library(folder / "initial")
        build(parent, description, found, library, calibration=[next(batches(0))])
        for training in (Training(**FREE, together=4), Training(steps=STEPS, batch=4, clip=0.05)):
            with counted() as calls:
                distill(parent, found, library, Library(folder / f"shared_{training.clip:g}"), batches, training)
            layers = [library.layer(parent, variant) for variant in trainable(found)]
            dtypes = sum(len({weight.dtype for weight in layer.parameters()}) for layer in layers)
            assert calls == {
                "reduce_scatter_tensor": STEPS * dtypes,  # one per variant, or two if its weights have two dtypes
                "all_gather_into_tensor": STEPS * dtypes,
                "all_reduce": STEPS * (len(layers) + 1) + 1,  # norms of all variants, their scales; errors at the end
            }, calls
            for variant in trainable(found):
                whole_states(parent, variant, training.clip)

        parent = open_parent(config, folder / "checkpoint", "shard")
        runs: Counter[int] = Counter()
        for number, layer in enumerate(parent.layers):
            layer.register_forward_hook(lambda *_, number=number: runs.update([number]))
        done, stop_at = [], 0

        def stop(count: int) -> None:
            nonlocal stop_at
            stop_at -= 1
            if not stop_at:
                raise KeyboardInterrupt

        # With groups of one it stops in the fifth step of the second group, otherwise of the first.
        for together, calls in ((1, 1 + 1 + STEPS + 1 + 5), (3, 1 + 1 + 5)):
            inputs, trained = BlockInputs(folder / "inputs"), Library(folder / f"resumed_{together}")
            training, stop_at = Training(**FREE, together=together, save_interval=3), calls
            for last in (False, True):
                try:
                    distill(parent, found, library, trained, batches, training, inputs=inputs, advance=stop)
                    assert last
                except KeyboardInterrupt:
                    inputs.wait()
                ranks.wait()
                files = [file.parent.name for file in inputs.folder.rglob("*.safetensors")]
                done.append({"runs": [runs[number] for number in range(len(found))], "files": Counter(files)})
                runs.clear()
        if ranks.number() == 0:
            (folder / "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
