"""Block-wise local distillation: every variant is trained to reproduce its parent block's output.

One forward pass of the parent serves many variants: each gets the parent block's input and is trained on its output,
independently of other blocks (Puzzle, section 3.1, "decoupled": attention and FFN variants are trained separately). The
loss is the squared error relative to the block's contribution, |variant(x) - block(x)|^2 / |block(x) - x|^2, so a no-op
has a loss of 1.
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

_FIRST_SCALE, _GROWTH_INTERVAL = 65536.0, 2000
"""First loss scale in FP16, and steps without an overflow after which it doubles, as in torch.amp.GradScaler."""
_BUCKET = 1 << 27
"""Maximum number of weights that share a reduce-scatter and an all-gather, which limits the memory of both."""
_LAYOUT = 2
"""Layout of the tensors in a checkpoint: one for each bucket."""


@dataclass(frozen=True)
class Result:
    """Training result of a variant.

    Attributes:
        block: 1-based number of the block.
        first: normalised error of the initial weights on the first batch.
        last: mean normalised error over the last tenth of the steps.
    """

    block: int
    variant: str
    first: float
    last: float


def trainable(by_block: Sequence[Sequence[Variant]]) -> list[Variant]:
    """List the variants to train, which are all except unchanged blocks and no-ops."""
    return [variant for each in by_block for variant in each if variant.block is not None and variant.name != KEEP]


def distill(
    parent: Parent,
    by_block: Sequence[Sequence[Variant]],
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

    Data-parallel: batches are split over ranks and gradients averaged. Each rank holds the variants' weights, and a
    shard of their FP32 master weights and AdamW moments (ZeRO-2).

    Args:
        by_block: variants of each block, from `variants`.
        trained: library of trained weights; a group of variants is written after its last step, and its checkpoint
            every `training.save_interval` steps.
        batches: function that iterates over this rank's tokens `[batch, seq]` from a given step on; all groups get the
            same data, so results do not depend on grouping or interruptions.
        shard: shard to which `by_block` belongs, whose checkpoints have their own names; if None, the checkpoints of
            any shards are resumed.
        inputs: storage for the inputs of the next group's first block, used only by this training and shard, and empty
            at the end; None to run the parent from its first block for every group, with the same results.
        advance: called after every step of a group with its number of variants; earlier steps are counted too.

    Returns:
        One result per trainable variant, in order.

    Raises:
        ValueError: there are too few batches, or a checkpoint was written with other settings.
    """
    every = {(variant.number, variant.name): variant for variant in trainable(by_block)}
    todo = data_parallel.agreed(lambda: [key for key, variant in every.items() if not trained.has(variant)])
    begun = data_parallel.agreed(lambda: _begun(trained, training, shard))
    for file in [file for file, keys in begun.items() if not {*keys} & {*todo}]:  # all of its variants are finished
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
    return results(by_block, trained)


def results(by_block: Sequence[Sequence[Variant]], trained: Library) -> list[Result]:
    """Read the variants' training results from the files of their trained weights."""
    collected = []
    for variant in trainable(by_block):
        notes = trained.notes(variant)
        collected.append(Result(variant.number + 1, variant.name, float(notes["first"]), float(notes["last"])))
    return collected


class _InTraining:
    """A variant in training: its weights, and this rank's shard of FP32 master weights and AdamW moments.

    Weights of the same dtype are flattened into buckets, each of which is reduced and gathered at once.

    With FP16 weights, the error is scaled before the backward pass, as otherwise its gradients underflow. The first
    step halves the scale until nothing overflows. Later, the scale is doubled after `_GROWTH_INTERVAL` steps without an
    overflow, and halved after one, whose step is skipped.
    """

    def __init__(self, layer: Any, training: Training) -> None:
        self.layer, self.clip = layer, training.clip
        self.buckets = _buckets(list(layer.parameters()))
        weights = [weight for bucket in self.buckets for weight in bucket]
        self.scaled = any(weight.dtype == torch.float16 for weight in weights)
        self.scale, self.clean_steps = (_FIRST_SCALE if self.scaled else 1.0), 0
        self.masters = [
            data_parallel.part_of(torch.cat([weight.detach().reshape(-1) for weight in bucket])).float()
            for bucket in self.buckets
        ]
        self.optimizer = torch.optim.AdamW(self.masters, lr=training.lr, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _decay(training.steps))

    def step(self, error: Tensor) -> None:
        """Take an optimizer step with the gradients of this rank's error, averaged over ranks. Collective."""
        first = self.scaled and not self.optimizer.state
        norm = self._set_gradients(error, again=first)
        while first and self.scale > 1 and not norm.isfinite():
            self.scale /= 2
            norm = self._set_gradients(error, again=True)
        if not self.scaled or norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.clip, norm)
            self.optimizer.step()
            self.schedule.step()
        if self.scaled:
            self.clean_steps = self.clean_steps + 1 if norm.isfinite() else 0
            if self.clean_steps == 0:
                self.scale = max(1.0, self.scale / 2)
            elif self.clean_steps % _GROWTH_INTERVAL == 0:
                self.scale *= 2
        self.optimizer.zero_grad()
        self._spread()

    def _set_gradients(self, error: Tensor, *, again: bool) -> Tensor:
        """Set the gradients of this rank's master weights, and return their norm over all ranks. Collective.

        Gradients of `error` are averaged over ranks. `again` keeps the graph, so that this can be called again.
        """
        weights = [weight for bucket in self.buckets for weight in bucket]
        gradients = [
            *torch.autograd.grad(
                error * self.scale, weights, allow_unused=True, materialize_grads=True, retain_graph=again
            )
        ]
        for master, bucket in zip(reversed(self.masters), reversed(self.buckets), strict=True):
            master.grad = data_parallel.mean_part(gradients[-len(bucket) :]).div_(self.scale)
            del gradients[-len(bucket) :]
        local_norm = torch.nn.utils.get_total_norm([each.grad for each in self.masters if each.grad is not None])
        return data_parallel.summed(local_norm.square()).sqrt()

    def _spread(self) -> None:
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            sizes = [weight.numel() for weight in bucket]
            whole = data_parallel.whole_of(master.to(bucket[0].dtype), sum(sizes))
            for weight, values in zip(bucket, whole.split(sizes), strict=True):
                weight.data.copy_(values.view_as(weight))

    def state(self) -> dict[str, Any]:
        """Return this rank's shards of master weights and optimizer state, and the schedule's state."""
        return {
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scale": (self.scale, self.clean_steps),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore a checkpoint. Collective.

        The states are this rank's only or, if the number of ranks has changed, those of all ranks in order.
        """

        def own(parts: Sequence[Tensor], at: int) -> Tensor:
            if len(parts) == 1 or not parts[0].dim():
                return parts[0]
            return data_parallel.part_of(torch.cat([*parts])[: sum(weight.numel() for weight in self.buckets[at])])

        for at, master in enumerate(self.masters):
            master.copy_(own([each["masters"][at] for each in states], at))
        every = [each["optimizer"]["state"] for each in states]
        moments = {at: {key: own([each[at][key] for each in every], at) for key in every[0][at]} for at in every[0]}
        self.optimizer.load_state_dict({**states[0]["optimizer"], "state": moments})
        self.schedule.load_state_dict(states[0]["schedule"])
        self.scale, self.clean_steps = states[0].get("scale", (self.scale, self.clean_steps))
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
    """Train a group of variants in the same forward passes, and write them to `trained`.

    Args:
        parent, library, trained, batches, training, advance, inputs: as in `distill`.
        group: the variants.
        file: main file of the group's checkpoint, from which an interrupted group is resumed.
        after: 0-based number of the block whose inputs the next group needs; None for the last group.
    """
    learners = [_InTraining(library.layer(parent, variant), training) for variant in group]
    errors: list[list[float]] = [[] for _ in group]
    unread: list[Tensor] = []  # errors since the last checkpoint, on the device
    first = 0
    if data_parallel.agreed(file.is_file):
        state = _read(file)
        first, errors, ranks = state["step"], state["errors"], state["ranks"]
        needed = [data_parallel.number()] if ranks == data_parallel.count() else range(ranks)
        files = [_part(file, first, number, ranks) for number in needed]
        if lost := [each for each in files if not each.is_file()]:
            raise ValueError(
                f"{lost[0]} is missing, but {file} refers to it: remove {file} to train its variants again"
            )
        parts = [_read(each) for each in files]
        for learner, each in zip(learners, zip(*parts, strict=True), strict=True):
            learner.load(each)
        del parts

    advance(first * len(group))
    data, places = batches(first), sorted({variant.number for variant in group})
    begin, last, steps = places[0], places[-1], range(first, training.steps)
    source = inputs if inputs is not None and inputs.has(begin, steps) else None
    if inputs is not None and source is None and after != begin and len(steps):
        inputs.forget(begin)  # an incomplete set from an earlier start
    sink = None  # storage for inputs of block `after`, unless they exist or that block comes earlier
    if inputs is not None and after is not None and (after > begin or (after == begin and source is None)):
        sink, last = inputs, max(last, after - 1)
    numbers = sorted({*places, last, *([] if sink is None or after is None or after > last else [after])})
    hidden = None if source is None else source.read(begin, steps)
    for step in steps:
        tokens = next(data, None)
        if tokens is None:
            raise ValueError(
                f"distillation needs {training.steps} batches, but the data have only {step}: provide more data, or "
                "lower puzzle.distill.steps"
            )
        with torch.no_grad(), parent.recorded(numbers) as record:
            block_input = None if hidden is None else next(hidden).to(parent.device, non_blocking=True)
            parent.run_to(last, tokens, 0 if block_input is None else begin, block_input)
        if sink is not None and after is not None:
            sink.write(after, step, record[numbers.index(after)][0] if after in numbers else record[-1][1])
        own = {number: record[numbers.index(number)] for number in places}
        changes = torch.stack([(output - hidden).float().square().mean() for hidden, output in own.values()])
        changes = data_parallel.summed(changes).div_(data_parallel.count()).clamp_min_(torch.finfo(torch.float32).tiny)
        for variant, learner in zip(group, learners, strict=True):
            block_input, output = own[variant.number]
            made = parent.block_output(variant.number, block_input, learner.layer)
            error = (made - output).float().square().mean() / changes[places.index(variant.number)]
            learner.step(error)
            unread.append(error.detach())
        if (step + 1) % training.save_interval == 0 or step + 1 == training.steps:
            if sink is not None:
                sink.wait()
            means = data_parallel.summed(torch.stack(unread)).div_(data_parallel.count()).tolist()
            unread.clear()
            for place, seen in enumerate(errors):
                seen += means[place :: len(group)]
            part = _part(file, step + 1, data_parallel.number(), data_parallel.count())
            _write(part, [learner.state() for learner in learners])
            data_parallel.wait()
            state = {
                "variants": [(variant.number, variant.name) for variant in group],
                "training": _identity(training),
                "layout": _LAYOUT,
                "step": step + 1,
                "ranks": data_parallel.count(),
                "errors": errors,
            }
            data_parallel.written(partial(_index, file, state))
            if source is not None and after != begin:
                source.remove(begin, range(step + 1))
        advance(len(group))
    tail = max(1, training.steps // 10)

    def write() -> None:
        for variant, learner, seen in zip(group, learners, errors, strict=True):
            prefix = _prefix(variant)
            tensors = take_tensors(learner.layer, prefix)
            weights = {name.removeprefix(prefix): tensor.cpu() for name, tensor in tensors.items()}
            trained.write(variant, weights, first=repr(seen[0]), last=repr(sum(seen[-tail:]) / tail))
        _remove(file)

    data_parallel.written(write)


def _identity(training: Training) -> dict[str, Any]:
    """Return the settings that a distillation run must keep to be resumed."""
    return {name: value for name, value in asdict(training).items() if name != "inputs"}


def _checkpoint(trained: Library, shard: Shard | None) -> Path:
    return trained.folder / ("in_training.pt" if shard is None else f"in_training_{shard.label}.pt")


def _parts(file: Path) -> Path:
    """Return the folder with the ranks' parts of the checkpoint whose main file is `file`."""
    return file.with_suffix(".parts")


def _part(file: Path, step: int, number: int, ranks: int) -> Path:
    return _parts(file) / f"step_{step:06d}_{number}of{ranks}.pt"


def _index(file: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint's main file, which makes it valid, and remove the ranks' files of earlier steps."""
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
    """Return a mapping from the checkpoints of interrupted groups to the groups' variants (0-based block number, name).

    Some of these variants may already be in the library. With a shard, only its own checkpoint is considered.
    """
    every = [_checkpoint(trained, shard)] if shard else sorted(trained.folder.glob("in_training*.pt"))
    begun = {}
    for file in every:
        if not file.is_file():
            continue
        state = _read(file)
        if state.get("layout") != _LAYOUT:
            raise ValueError(f"{file} is from an older nemo_ext: remove it to train its variants again")
        if state["training"] != _identity(training):
            raise ValueError(
                f"{file} is from a distillation with other settings ({state['training']}): use those, or remove "
                "it to start over"
            )
        begun[file] = [(number, name) for number, name in state["variants"]]
    return begun


def _buckets(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group weights by dtype, in buckets of at most `_BUCKET` elements, or of one weight."""
    buckets: list[list[Tensor]] = []
    for weight in sorted(weights, key=lambda weight: str(weight.dtype)):
        fits = buckets and buckets[-1][0].dtype == weight.dtype
        if fits and sum(other.numel() for other in buckets[-1]) + weight.numel() <= _BUCKET:
            buckets[-1].append(weight)
        else:
            buckets.append([weight])
    return buckets


def _decay(steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor by step: cosine decay to zero after a warm-up over a twentieth of the steps."""
    warm_up = max(1, steps // 20)
    return lambda step: min((step + 1) / warm_up, 0.5 * (1 + cos(pi * min(1.0, step / steps))))
