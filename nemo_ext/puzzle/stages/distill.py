"""Block-wise local distillation: every variant learns its parent block's output from the parent's own input.

One forward pass of the parent serves many variants: each sees the input that the parent's block saw, and is trained to
reproduce the block's output by itself, regardless of later blocks (Puzzle, section 3.1; "decoupled": attention and
FFN variants apart). The loss is the mean squared error relative to the parent block's own contribution,
|variant(x) - block(x)|^2 / |block(x) - x|^2, so a no-op has a loss of 1.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.megatron.session import take_tensors
from nemo_ext.puzzle.settings import Training
from nemo_ext.puzzle.stages.block_inputs import BlockInputs
from nemo_ext.puzzle.stages.library import Library
from nemo_ext.puzzle.stages.shards import Shard
from nemo_ext.puzzle.variants import KEEP, Variant


@dataclass(frozen=True)
class Result:
    """Training result of a variant.

    Attributes:
        block: 1-based number of the block.
        variant: name of the variant.
        first: normalised error of the initial weights on the first batch.
        last: mean normalised error over the last tenth of the steps.
    """

    block: int
    variant: str
    first: float
    last: float


def trainable(found: Sequence[Sequence[Variant]]) -> list[Variant]:
    """Variants with weights of their own."""
    return [variant for each in found for variant in each if variant.block is not None and variant.name != KEEP]


def distill(
    parent: Parent,
    found: Sequence[Sequence[Variant]],
    library: Library,
    trained: Library,
    batches: Callable[[int], Iterator[Tensor]],
    training: Training,
    *,
    shard: Shard | None = None,
    inputs: BlockInputs | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Result]:
    """Train every variant of `library` that is not in `trained` yet.

    Data parallel: every rank has its part of each batch, and gradients are averaged over ranks. Each rank has the
    variants' weights, and a part of their FP32 master weights and of AdamW's moments (ZeRO-2).

    Args:
        parent: the model.
        found: variants of each block, from `variants`.
        library: library of initial weights.
        trained: library of trained weights; a group of variants is written after its last step, and a checkpoint of the
            group in training every `training.save_interval` steps.
        batches: this rank's tokens `[batch, seq]` from the given step on; all groups of variants see the same ones, so
            results do not depend on grouping or interruptions.
        training: see `Training`.
        shard: shard that `found` belongs to, while others train theirs into the same library; its checkpoints have
            names of their own. Without one, checkpoints left by shards are resumed.
        inputs: where each group keeps what comes to the next one's first block, of this training and shard alone; None
            to run the parent from its start for every group. Results are the same; it is empty at the end.
        advance: called for every step of a group with the number of its variants; also for steps already done.

    Returns:
        One result per trainable variant, in order.

    Raises:
        ValueError: there are too few batches, or a checkpoint is from another training.
    """
    every = {(variant.number, variant.name): variant for variant in trainable(found)}
    todo = data_parallel.agreed(lambda: [key for key, variant in every.items() if not trained.has(variant)])
    begun = data_parallel.agreed(lambda: _begun(trained, training, shard))
    for file in [file for file, keys in begun.items() if not {*keys} & {*todo}]:  # all of its variants are written
        del begun[file]
        data_parallel.written(partial(_remove, file))
    interrupted = {key for keys in begun.values() for key in keys}
    advance((len(every) - len({*todo, *interrupted})) * training.steps)
    groups = [([every[key] for key in keys], file) for file, keys in begun.items()]
    rest = [every[key] for key in todo if key not in interrupted]
    for start in range(0, len(rest), training.together):
        groups.append((rest[start : start + training.together], _checkpoint(trained, shard)))
    for (group, file), after in zip_longest(groups, (group[0].number for group, _ in groups[1:])):
        train_group(parent, group, library, trained, batches, training, file, advance, inputs, after)
    if inputs is not None:
        inputs.clear()
    return results(found, trained)


def results(found: Sequence[Sequence[Variant]], trained: Library) -> list[Result]:
    """Training results of the trained variants, read from their files."""
    made = []
    for variant in trainable(found):
        notes = trained.notes(variant)
        made.append(Result(variant.number + 1, variant.name, float(notes["first"]), float(notes["last"])))
    return made


class _InTraining:
    """A variant in training; every rank has its weights, and a part of its FP32 master weights and AdamW's moments."""

    def __init__(self, layer: Any, training: Training) -> None:
        self.layer, self.clip = layer, training.clip
        self.weights: list[Tensor] = list(layer.parameters())
        self.masters = [data_parallel.part_of(each.detach()).float().requires_grad_() for each in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=training.lr, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _decay(training.steps))

    def step(self, error: Tensor) -> None:
        """Takes a step against this rank's error; all ranks together."""
        gradients = [*torch.autograd.grad(error, self.weights, allow_unused=True, materialize_grads=True)]
        for master in reversed(self.masters):
            master.grad = data_parallel.mean_part(gradients.pop())
        own = torch.nn.utils.get_total_norm([each.grad for each in self.masters if each.grad is not None])
        norm = data_parallel.summed(own.square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.clip, norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self._spread()

    def _spread(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(data_parallel.whole_of(master.detach().to(weight.dtype), weight))

    def state(self) -> dict[str, Any]:
        """This rank's parts of the master weights and of the optimizer's state, and the schedule's state."""
        return {
            "masters": [each.detach() for each in self.masters],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes up this rank's `state`, or those of all ranks of another number; all ranks together."""

        def own(parts: Sequence[Tensor], at: int) -> Tensor:
            if len(parts) == 1 or not parts[0].dim():
                return parts[0]
            return data_parallel.part_of(torch.cat([*parts])[: self.weights[at].numel()])

        for at, master in enumerate(self.masters):
            master.data.copy_(own([each["masters"][at] for each in states], at))
        every = [each["optimizer"]["state"] for each in states]
        moments = {at: {key: own([each[at][key] for each in every], at) for key in every[0][at]} for at in every[0]}
        self.optimizer.load_state_dict({**states[0]["optimizer"], "state": moments})
        self.schedule.load_state_dict(states[0]["schedule"])
        self._spread()


def train_group(
    parent: Parent,
    group: Sequence[Variant],
    library: Library,
    trained: Library,
    batches: Callable[[int], Iterator[Tensor]],
    training: Training,
    file: Path,
    advance: Callable[[int], None],
    inputs: BlockInputs | None = None,
    after: int | None = None,
) -> None:
    """Trains variants side by side and writes them to `trained`.

    Args:
        file: their checkpoint.
        after: 0-based number of the block whose inputs the next group wants; None for none.
        others: as of `distill`.
    """
    learners = [_InTraining(library.layer(parent, variant), training) for variant in group]
    errors: list[list[float]] = [[] for _ in group]
    first = 0
    if data_parallel.agreed(file.is_file):
        state = _read(file)
        first, errors, ranks = state["step"], state["errors"], state["ranks"]
        wanted = [data_parallel.number()] if ranks == data_parallel.count() else range(ranks)
        files = [_part(file, first, number, ranks) for number in wanted]
        if lost := [each for each in files if not each.is_file()]:
            raise ValueError(f"{lost[0]}: not there, but {file} names it: remove {file}, and its variants begin again")
        parts = [_read(each) for each in files]
        for learner, each in zip(learners, zip(*parts, strict=True), strict=True):
            learner.load(each)
        del parts

    advance(first * len(group))
    data, places = batches(first), sorted({variant.number for variant in group})
    begin, last, steps = places[0], places[-1], range(first, training.steps)
    kept = inputs if inputs is not None and inputs.has(begin, steps) else None
    if inputs is not None and kept is None and after != begin and len(steps):
        inputs.forget(begin)  # what an earlier start left of it
    left = None  # where inputs of block `after` go, unless they are there or that block comes before
    if inputs is not None and after is not None and (after > begin or (after == begin and kept is None)):
        left, last = inputs, max(last, after - 1)
    numbers = sorted({*places, last, *([] if left is None or after is None or after > last else [after])})
    hidden = None if kept is None else kept.read(begin, steps)
    for step in steps:
        tokens = next(data, None)
        if tokens is None:
            raise ValueError(f"distillation wants {training.steps} batches, the data end after {step}")
        with torch.no_grad(), parent.recorded(numbers) as record:
            given = None if hidden is None else next(hidden).to(parent.device, non_blocking=True)
            parent.run_to(last, tokens, 0 if given is None else begin, given)
        if left is not None and after is not None:
            left.write(after, step, record[numbers.index(after)][0] if after in numbers else record[-1][1])
        for variant, learner, seen in zip(group, learners, errors, strict=True):
            error = _error(parent, variant, learner.layer, *record[numbers.index(variant.number)])
            learner.step(error)
            seen.append((data_parallel.summed(error.detach()) / data_parallel.count()).item())
        if (step + 1) % training.save_interval == 0 or step + 1 == training.steps:
            if left is not None:
                left.wait()
            own = _part(file, step + 1, data_parallel.number(), data_parallel.count())
            _write(own, [learner.state() for learner in learners])
            data_parallel.wait()
            state = {
                "variants": [(variant.number, variant.name) for variant in group],
                "training": _told(training),
                "step": step + 1,
                "ranks": data_parallel.count(),
                "errors": errors,
            }
            data_parallel.written(partial(_index, file, state))
            if kept is not None and after != begin:
                kept.remove(begin, range(step + 1))
        advance(len(group))
    tail = max(1, training.steps // 10)

    def write() -> None:
        for variant, learner, seen in zip(group, learners, errors, strict=True):
            prefix = _prefix(variant)
            tensors = take_tensors(learner.layer, prefix)
            made = {name.removeprefix(prefix): tensor.cpu() for name, tensor in tensors.items()}
            trained.write(variant, made, first=repr(seen[0]), last=repr(sum(seen[-tail:]) / tail))
        _remove(file)

    data_parallel.written(write)


def _told(training: Training) -> dict[str, Any]:
    """What decides the results of a training."""
    return {name: each for name, each in asdict(training).items() if name != "inputs"}


def _checkpoint(trained: Library, shard: Shard | None) -> Path:
    return trained.folder / ("in_training.pt" if shard is None else f"in_training_{shard.label}.pt")


def _parts(file: Path) -> Path:
    """Folder with the ranks' parts of a checkpoint."""
    return file.with_suffix(".parts")


def _part(file: Path, step: int, number: int, ranks: int) -> Path:
    return _parts(file) / f"step_{step:06d}_{number}of{ranks}.pt"


def _index(file: Path, state: Mapping[str, Any]) -> None:
    """Writes what makes the ranks' parts of this step a checkpoint, and removes older parts."""
    _write(file, state)
    for part in _parts(file).iterdir():
        if not part.name.startswith(f"step_{state['step']:06d}_"):
            part.unlink()


def _write(file: Path, state: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(file)


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=True, map_location="cpu", mmap=True)


def _remove(file: Path) -> None:
    shutil.rmtree(_parts(file), ignore_errors=True)
    file.unlink()


def _prefix(variant: Variant) -> str:
    return f"decoder.layers.{variant.number}."


def _begun(trained: Library, training: Training, shard: Shard | None) -> dict[Path, list[tuple[int, str]]]:
    """Groups whose training was interrupted, by checkpoint; some of their files may already be written."""
    every = [_checkpoint(trained, shard)] if shard else sorted(trained.folder.glob("in_training*.pt"))
    begun = {}
    for file in every:
        if not file.is_file():
            continue
        state = _read(file)
        if "ranks" not in state:
            raise ValueError(f"{file} was begun by an older nemo_ext: remove it, and its variants begin again")
        if state["training"] != _told(training):
            raise ValueError(f"{file} is of another training ({state['training']}): remove it, or train as it says")
        begun[file] = [(number, name) for number, name in state["variants"]]
    return begun


def _error(parent: Parent, variant: Variant, layer: torch.nn.Module, hidden: Tensor, output: Tensor) -> Tensor:
    made = parent.block_output(variant.number, hidden, layer)
    scale = data_parallel.summed((output - hidden).float().square().mean()) / data_parallel.count()
    return (made - output).float().square().mean() / scale.clamp_min(torch.finfo(torch.float32).tiny)


def _decay(steps: int) -> Callable[[int], float]:
    """Cosine decay to zero after a warm-up over a twentieth of the steps."""
    warm_up = max(1, steps // 20)
    return lambda step: min((step + 1) / warm_up, 0.5 * (1 + cos(pi * min(1.0, step / steps))))
