"""Stages that run a model, on one rank: library, distill, score, cost, compare, realise, fuse, evaluate.

Ranks split the data (`data_parallel`); rank 0 writes. Each stage resumes from what an interrupted run left.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from filelock import FileLock

from nemo_ext.architecture.block_configs import to_block_configs
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent, Replaced
from nemo_ext.blockwise.sharded import open_parent
from nemo_ext.blockwise.token_batches import TokenBatches
from nemo_ext.checkpoint.beside import extras_beside, keep_extras, write_model_file
from nemo_ext.checkpoint.description import Description, megatron_arguments, to_config
from nemo_ext.checkpoint.start import description_of
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.checkpoint.writing import MEGATRON, Work, cut_into_parts, write_checkpoint
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.job.files import write_text
from nemo_ext.job.run_directory import read_config
from nemo_ext.job.statistics import difference
from nemo_ext.megatron.session import data_parallel as process_group
from nemo_ext.puzzle.choice.baselines import CannotReach, at_random, greedy, last, uniform
from nemo_ext.puzzle.choice.choose import Costs
from nemo_ext.puzzle.configs import stage_config
from nemo_ext.puzzle.cost import RESOURCES, block_costs, outside_costs
from nemo_ext.puzzle.fusion.dependency import draw_dependency, measure_dependency
from nemo_ext.puzzle.fusion.fusion import Group, fuse, fused, plan, runs
from nemo_ext.puzzle.latencies import blocks_to_measure, read_table
from nemo_ext.puzzle.score_file import collect_scores, read_scores
from nemo_ext.puzzle.settings import Batches, Settings, settings
from nemo_ext.puzzle.stages import evaluate
from nemo_ext.puzzle.stages.block_inputs import BlockInputs
from nemo_ext.puzzle.stages.distill import distill, trainable
from nemo_ext.puzzle.stages.library import Library, build
from nemo_ext.puzzle.stages.measure import (
    OUTSIDE,
    block_key,
    distinct_blocks,
    initial_layer,
    measure_blocks,
    measured_costs,
)
from nemo_ext.puzzle.stages.realise import child, realise
from nemo_ext.puzzle.stages.score import score_blocks
from nemo_ext.puzzle.stages.shards import LOCKS, Shard
from nemo_ext.puzzle.variants import KEEP, Variant, variants
from nemo_ext.puzzle.workspace import Workspace

SHARD_GIGABYTES = 5.0
RANDOM_CHOICES = 3


def run(config_path: str, names: Sequence[str]) -> None:
    """Carry out stages on this rank, except those already finished.

    Args:
        config_path: path of the composed config, data arguments filled in.
        names: names from `workspace.STAGES`, in order.

    Raises:
        ValueError: a stage was done with other settings before, or its settings do not fit the model or the data.
    """
    config = read_config(Path(config_path))
    with process_group():
        stages = Stages(config)
        for name in names:
            if not data_parallel.agreed(partial(stages.workspace.is_finished, name)):
                data_parallel.written(partial(stages.workspace.begin, name))
                empty = getattr(stages, name)() is False
                data_parallel.written(partial(stages.workspace.finish, name, empty=empty))


class Stages:
    """The stages of one child.

    Args:
        config: composed config, with `puzzle`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.chosen: Settings = settings(config["puzzle"])
        self.workspace = Workspace(config, self.chosen)
        self.description = description_of(self.workspace.parent)
        self.found = variants(self.description.architecture, self.chosen.variants)
        self._costs: dict[Block | None, dict[str, float]] = {}

    @cached_property
    def parent(self) -> Parent:
        """The parent's model with its weights."""
        return self.open(self.workspace.parent, self.description)

    def open(self, checkpoint: Path, description: Description) -> Parent:
        """Model of a checkpoint, whole on this rank or shared out (`puzzle.fsdp`)."""
        config = stage_config(self.config, description, data_parallel.count())
        return open_parent(config, checkpoint, self.chosen.fsdp)

    def tokens(self, split: Any, of: Batches) -> list[torch.Tensor]:
        """This rank's batches of the calibration or the validation set."""
        return self._token_batches(split, of.sequences).batches(of.batch)

    def _token_batches(self, split: Any, sequences: int) -> TokenBatches:
        # Megatron's first reader of a data set writes its index for later readers, who must not find it half written:
        # ranks wait for rank 0 anyway, shards wait for each other here.
        device = self.parent.device  # opens the model, for which shards need not wait
        alone: AbstractContextManager[object] = nullcontext()
        if self.workspace.shard is not None and data_parallel.number() == 0:
            alone = FileLock(self.workspace.run_dir / LOCKS / "data.lock")
        with alone:
            config = stage_config(self.config, self.description, data_parallel.count())
            return TokenBatches(config, split, sequences, device)

    @cached_property
    def calibration(self) -> list[torch.Tensor]:
        """This rank's share of the calibration set."""
        return self.tokens("train", self.chosen.calibration)

    @cached_property
    def validation(self) -> list[torch.Tensor]:
        """This rank's share of the validation set."""
        return self.tokens("valid", self.chosen.evaluation)

    @cached_property
    def best(self) -> Library:
        """Library with the weights of every variant: trained ones if they were trained."""
        return Library(self.workspace.trained if self.chosen.distill.steps else self.workspace.initial)

    def library(self) -> None:
        """Make every variant from the parent's weights."""
        with data_parallel.progress("library", sum(map(len, self.found)), "variants") as advance:
            build(
                self.parent,
                self.description,
                self.found,
                Library(self.workspace.initial),
                calibration=self.calibration,
                advance=advance,
            )

    def distill(self) -> None:
        """Train every variant to reproduce its block's output."""
        training = self.chosen.distill
        if not training.steps:
            return
        shard = self.workspace.shard
        found = self._share([trainable([each]) for each in self.found])
        if shard is None or any(found):
            initial, trained = Library(self.workspace.initial), Library(self.workspace.trained)
            self._distill(found, initial, trained, "distill", shard)

    def _share(self, found: Sequence[Sequence[Variant]]) -> Sequence[Sequence[Variant]]:
        """The variants that this shard deals with; all without a shard."""
        shard = self.workspace.shard
        if shard is None:
            return found
        own = shard.share(found)
        if not any(own):
            data_parallel.say(f"shard {shard}: there are only {sum(map(len, found))} variants, so it has nothing to do")
        return own

    def _distill(
        self,
        found: Sequence[Sequence[Variant]],
        initial: Library,
        trained: Library,
        label: str,
        shard: Shard | None = None,
    ) -> None:
        training = self.chosen.distill
        data = self._token_batches("train", training.steps * training.batch)
        folder = training.inputs
        inputs = None if folder is None else BlockInputs(self.workspace.block_inputs(folder))
        with data_parallel.progress(label, training.steps * len(trainable(found)), "steps") as advance:
            distill(
                self.parent,
                found,
                initial,
                trained,
                lambda step: data.stream(step, training.batch),
                training,
                shard=shard,
                inputs=inputs,
                advance=advance,
            )

    def score(self) -> None:
        """Score every variant in place of its block."""
        scores, whole = self.workspace.scores, self.workspace.shard is None
        order = [(variant.number + 1, variant.name) for each in self.found for variant in each]
        found = self._share(self.found)
        if whole:
            data_parallel.written(lambda: collect_scores(scores, self.workspace.scores_of_shards(), order))
        else:  # a run without shards may have begun
            done = data_parallel.agreed(lambda: {(score.block, score.variant) for score in read_scores(scores)})
            found = [[v for v in each if (v.number + 1, v.name) not in done] for each in found]
        if not any(found):
            return
        with data_parallel.progress("score", sum(map(len, found)), "variants") as advance:
            score_blocks(
                self.parent,
                found,
                partial(self.best.layer, self.parent),
                self.calibration,
                self.workspace.own_scores,
                advance=advance,
            )
        if whole:
            data_parallel.written(lambda: collect_scores(scores, [], order))

    def cost(self) -> None:
        """Write the resources of every variant."""
        serving, architecture = self.chosen.serving, self.description.architecture
        costs = Costs(
            outside_costs(architecture, serving),
            {
                (v.number + 1, v.name): (v.block, block_costs(architecture, v.block, serving))
                for each in self.found
                for v in each
            },
        )
        if self.chosen.measure.table is not None:
            costs = self._with_table(costs, Path(self.chosen.measure.table))
        if not self.chosen.measure.enabled:
            data_parallel.written(lambda: costs.write(self.workspace.costs))
            return
        parent = self.parent  # on every rank: loading it is collective
        data_parallel.written(lambda: self._measured(parent, costs).write(self.workspace.costs))

    def _with_table(self, costs: Costs, file: Path) -> Costs:
        """The same costs with the latencies of a table."""
        wanted = blocks_to_measure(self.found)
        table = read_table(file, self.description.architecture, wanted, self.chosen.serving)
        return Costs(
            measured_costs(costs.outside, table[OUTSIDE]),
            {
                key: (block, own if block is None else measured_costs(own, table[str(block)]))
                for key, (block, own) in costs.variants.items()
            },
        )

    def _measured(self, parent: Parent, costs: Costs) -> Costs:
        """The same costs with latencies timed on this machine, on one rank."""
        with data_parallel.progress("cost", len(distinct_blocks(self.found)) + 1, "blocks") as advance:
            measured = measure_blocks(
                parent,
                self.found,
                partial(initial_layer, parent, self.description),
                self.chosen.serving,
                self.workspace.measured,
                min_seconds=self.chosen.measure.min_seconds,
                advance=advance,
            )
        return Costs(
            measured_costs(costs.outside, measured[OUTSIDE]),
            {
                key: (block, measured_costs(own, measured[block_key(block)]))
                for key, (block, own) in costs.variants.items()
            },
        )

    def compare(self) -> None:
        """Evaluate the choices of the search; the one with the least loss on calibration data becomes the child.

        The reported losses are on validation data, which play no part in the selection.
        """
        choices = json.loads((self.workspace.folder / "choices.json").read_text())["choices"]
        rows: list[dict[str, Any]] = [self._row("parent", [each[0] for each in self.found], self.best)]
        for number, each in enumerate(choices, start=1):
            picked = self._named(each["variants"])
            calibration = None
            if len(choices) > 1:
                calibration = evaluate.loss(self.parent, self.calibration, self._replaced(picked, self.best))
            row = self._row(f"choice {number}", picked, self.best)
            rows.append(row | {"score": each["score"], "calibration_loss": calibration})
        best = min(rows[1:], key=lambda row: row["calibration_loss"]) if len(choices) > 1 else rows[1]
        rows = [_compared(row, rows[0]) for row in rows]
        self._write_json("comparison.json", rows)
        self._write_json("choice.json", best)

    def _write_json(self, name: str, content: Any) -> None:
        """Writes a file of the child's folder."""
        text = json.dumps(content, indent=1) + "\n"
        data_parallel.written(lambda: write_text(self.workspace.folder / name, text))

    def _row(self, name: str, picked: Sequence[Variant], library: Library) -> dict[str, Any]:
        blocks = [variant.block for variant in picked]
        losses = evaluate.losses(self.parent, self.validation, self._replaced(picked, library))
        return {
            "name": name,
            "loss": fmean(losses),
            "losses": losses,
            "costs": {resource: self._total(blocks, resource) for resource in RESOURCES},
            "variants": [variant.name for variant in picked],
            "pattern": format_pattern(child(self.description, picked).architecture.pattern),
        }

    def _named(self, names: Sequence[str]) -> list[Variant]:
        """One variant per block, by name."""
        return [next(v for v in each if v.name == name) for each, name in zip(self.found, names, strict=True)]

    def _replaced(self, picked: Sequence[Variant], library: Library) -> Replaced:
        replaced = {}
        for variant in picked:
            if variant.name != KEEP:
                layer = library.layer(self.parent, variant)
                if layer is not None and self.parent.share is not None:
                    self.parent.share(layer)  # a child has many
                replaced[variant.number] = layer
        return replaced

    def _total(self, blocks: Sequence[Block | None], resource: str) -> float:
        """Total of a resource for the whole model with these blocks."""
        architecture, serving = self.description.architecture, self.chosen.serving
        for block in {*blocks} - self._costs.keys():
            self._costs[block] = block_costs(architecture, block, serving)
        return sum((self._costs[block][resource] for block in blocks), outside_costs(architecture, serving)[resource])

    def baselines(self) -> bool:
        """Evaluate the baselines at the same cost, and the search limited by that resource alone, beside the child."""
        if not self.chosen.baselines:
            return False
        choices = json.loads((self.workspace.folder / "choices.json").read_text())
        most = choices["most"]
        cost = partial(self._total, resource=choices["resource"])
        scores = {(score.block, score.variant): score for score in read_scores(self.workspace.scores)}
        metric = self.chosen.search.metric

        def narrow() -> tuple[list[Variant], Library]:
            picked = uniform(self.description.blocks, cost, most)
            folder = self.workspace.folder / "baselines"
            initial, trained = Library(folder / "initial"), Library(folder / "trained")
            pairs = [[each[0], variant] for each, variant in zip(self.found, picked, strict=True)]
            build(self.parent, self.description, pairs, initial, calibration=self.calibration)
            if self.chosen.distill.steps:
                self._distill(pairs, initial, trained, "uniform pruning")
            return picked, trained if self.chosen.distill.steps else initial

        def drop() -> tuple[list[Variant], Library]:
            return greedy(self.found, lambda v: getattr(scores[v.number + 1, v.name], metric), cost, most), self.best

        def draw(seed: int) -> tuple[list[Variant], Library]:
            return at_random(self.found, cost, most, seed), self.best

        parent = json.loads((self.workspace.folder / "comparison.json").read_text())[0]
        own = json.loads((self.workspace.folder / "choice.json").read_text())
        rows = []
        if (alone := choices["alone"]) is not None:
            picked = self._named(alone["variants"])
            name = f"search with {choices['resource']} limited alone"
            rows.append(self._row(name, picked, self.best) | {"score": alone["score"]})
        chance = range(1, RANDOM_CHOICES + 1)
        methods: dict[str, Callable[[], tuple[list[Variant], Library]]] = {
            "uniform width pruning": narrow,
            "greedy dropping": drop,
            "last blocks dropped": lambda: (last(self.found, cost, most), self.best),
            **{f"random choice {seed}": partial(draw, seed) for seed in chance},
        }
        for name, make in methods.items():
            try:
                rows.append(self._row(name, *make()))
            except CannotReach as reason:
                rows.append({"name": name, "cannot": str(reason)})
        compared = [row if "cannot" in row else _compared(row, parent, own) for row in rows]
        self._write_json("baselines.json", compared)
        return True

    def realise(self) -> None:
        """Write the child's checkpoint, notation and block_configs."""
        names = json.loads((self.workspace.folder / "choice.json").read_text())["variants"]
        picked = self._named(names)
        made = child(self.description, picked)
        reader = TorchDistReader(checkpoint_folder(self.workspace.parent))
        work = realise(reader, self.description, picked, self.best)
        self._write(self.workspace.weights, work, made, {"choice": names})
        self._write_json("child.json", _as_json(made))

    def _write(self, to: Path, work: Sequence[Work], made: Description, identity: dict[str, Any]) -> None:
        source = self.workspace.parent
        extras = extras_beside(source, checkpoint_folder(source))

        def finish(folder: Path) -> None:
            name = f"{self.config['model']['name']}_{self.workspace.child}"
            write_model_file(folder, to_config(made), name=name, comment=f"A child of {source}.")
            keep_extras(extras, folder)

        def write() -> None:
            write_checkpoint(
                to,
                MEGATRON,
                cut_into_parts(work, SHARD_GIGABYTES),
                identity={**identity, "model": to_config(made)},
                finish=finish,
                arguments=megatron_arguments(made.architecture),
            )

        data_parallel.written(write)

    def fuse(self) -> bool:
        """Measure how the child's blocks depend on each other, and fuse its runs of FFN blocks."""
        given = self.chosen.fuse
        made = description_of(self.workspace.weights)
        if not given.enabled:
            return False
        opened = self.open(self.workspace.weights, made)
        file = self.workspace.folder / "dependency.jsonl"
        with data_parallel.progress("dependency", (len(made.blocks) - 1) * len(self.calibration), "passes") as advance:
            matrix = measure_dependency(opened, self.calibration, file, advance=advance)
        groups: list[Group] = []
        if made.architecture.norm_placement != "input":
            nothing = "norms on outputs cannot be folded into FFN blocks, so nothing is fused"
        elif not runs(made):
            nothing = "no two FFN blocks follow each other, so there is nothing to fuse"
        else:
            nothing = "the limits leave nothing to fuse"
            limits = {name: value for name, value in asdict(given).items() if name != "enabled"}
            groups = plan(made, dependency=matrix, precision=self.chosen.serving.precision, **limits)
        picture = self.workspace.folder / "dependency.png"
        title = f"{self.workspace.child}: how much blocks depend on earlier ones"
        pattern = made.architecture.pattern
        data_parallel.written(lambda: draw_dependency(matrix, picture, pattern=pattern, groups=groups, title=title))
        if not groups:
            data_parallel.say(f"fuse: {nothing}")
            return False
        reader = TorchDistReader(checkpoint_folder(self.workspace.weights))
        self._write(
            self.workspace.fused,
            fuse(reader, made, groups),
            fused(made, groups),
            {"groups": [[group.first, group.last] for group in groups]},
        )
        return True

    def evaluate(self) -> None:
        """Loss and speed of the child in every state, compared with the parent's in the same run."""
        states = {
            "parent": self.workspace.parent,
            "child": self.workspace.weights,
            "fused": self.workspace.fused,
            "healed": self.workspace.healed,
            "trained on": self.workspace.pretrained,
        }
        rows: list[dict[str, Any]] = []
        tokens, read_bytes = self.validation[0], self._bytes()
        predicted = int(data_parallel.summed(torch.tensor(sum(each[:, 1:].numel() for each in self.validation))))
        for name, checkpoint in states.items():
            if not checkpoint.is_dir():
                continue
            description = description_of(checkpoint)
            opened = self.parent if name == "parent" else self.open(checkpoint, description)
            beside, seconds = evaluate.forward_seconds(self.parent, opened, tokens)
            rows.append(
                {
                    "name": name,
                    "loss": fmean(losses := evaluate.losses(opened, self.validation)),
                    "losses": losses,
                    "bytes": read_bytes,
                    "predicted": predicted,
                    "blocks": len(description.blocks),
                    "forward_seconds": median(seconds),
                    "speedups": [parent / own for parent, own in zip(beside, seconds, strict=True)],
                    "tokens": tokens.numel(),
                    "costs": {r: self._total(description.blocks, r) for r in RESOURCES},
                    "pattern": format_pattern(description.architecture.pattern),
                }
            )
            del opened  # before the next one is read
        self._write_json("evaluation.json", [_compared(row, rows[0]) for row in rows])

    def _bytes(self) -> int | None:
        """Bytes of text whose tokens are predicted in the validation set; None where the config names no tokenizer."""
        tokenizer = (self.config.get("data") or {}).get("tokenizer")
        if tokenizer is None:
            return None
        loaded = load_tokenizer(tokenizer)
        texts = (loaded.decode(row[1:].tolist()) for tokens in self.validation for row in tokens)
        return int(data_parallel.summed(torch.tensor(sum(len(text.encode(errors="replace")) for text in texts))))


def _compared(row: dict[str, Any], parent: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row with its losses' paired differences, by sequence, from the parent's and from the child's."""
    sides = {"from_parent": parent, "from_child": own}
    return row | {
        name: asdict(difference(side["losses"], row["losses"], seed=1234)) for name, side in sides.items() if side
    }


def _as_json(made: Description) -> dict[str, Any]:
    """A child as notation, and as Puzzle's block_configs if they can express it."""
    pattern = made.architecture.pattern
    sizes = to_config(made)["megatron"]
    result: dict[str, Any] = {"pattern": format_pattern(pattern), "block_configs": None}
    try:
        result["block_configs"] = to_block_configs(
            pattern,
            hidden_size=sizes["hidden_size"],
            num_attention_heads=sizes.get("num_attention_heads", 1),
            num_query_groups=sizes.get("num_query_groups"),
            ffn_hidden_size=sizes.get("ffn_hidden_size"),
        )
    except ValueError as error:
        result["block_configs_missing"] = str(error)
    return result
