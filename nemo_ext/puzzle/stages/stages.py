"""Per-rank code of stages that run a model: library, distill, score, cost, compare, baselines, realise, fuse, evaluate.

Ranks split the data (`data_parallel`); rank 0 writes files. Each stage resumes an interrupted run.
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
from nemo_ext.puzzle.choice.baselines import CannotReach, at_random, greedy, uniform
from nemo_ext.puzzle.choice.choose import Costs
from nemo_ext.puzzle.configs import stage_config
from nemo_ext.puzzle.cost import RESOURCES, block_costs, outside_costs
from nemo_ext.puzzle.fusion.dependency import draw_dependency, measure_dependency
from nemo_ext.puzzle.fusion.fusion import Group, fuse, fused, plan, runs
from nemo_ext.puzzle.latencies import Latency, blocks_to_measure, read_table
from nemo_ext.puzzle.score_file import collect_scores, read_scores
from nemo_ext.puzzle.settings import Batches, Settings, settings
from nemo_ext.puzzle.stages import evaluate
from nemo_ext.puzzle.stages.block_inputs import BlockInputs
from nemo_ext.puzzle.stages.distill import distill, trainable
from nemo_ext.puzzle.stages.library import Library, build
from nemo_ext.puzzle.stages.measure import (
    OUTSIDE,
    Measured,
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
    """Run stages on this rank, skipping finished ones.

    Args:
        config_path: path of the composed config, with data arguments filled in.

    Raises:
        ValueError: a stage was run before with other settings, or its settings do not fit the model or the data.
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
    """One child's stages, each a method of the same name as the stage.

    Models are opened without multi-token prediction, as blocks are searched and measured without it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.chosen: Settings = settings(config["puzzle"])
        self.workspace = Workspace(config, self.chosen)
        self.whole = description_of(self.workspace.parent)
        self.description = self.whole.without_prediction()
        self.variants = variants(self.description.architecture, self.chosen.variants)
        self._costs: dict[Block | None, dict[str, float]] = {}

    @cached_property
    def parent(self) -> Parent:
        """The parent's model with its weights."""
        return self.open(self.workspace.parent, self.description)

    def open(self, checkpoint: Path, description: Description) -> Parent:
        """Load the model of a checkpoint, whole on this rank or sharded (`puzzle.fsdp`)."""
        config = stage_config(self.config, description, data_parallel.count())
        return open_parent(config, checkpoint, self.chosen.fsdp)

    def tokens(self, split: Any, size: Batches) -> list[torch.Tensor]:
        """Return this rank's batches of training or validation data, as tokens `[batch, seq]`.

        Args:
            split: `train` or `valid`.
            size: number of sequences on all ranks, and sequences per batch.
        """
        return self._token_batches(split, size.sequences).batches(size.batch)

    def _token_batches(self, split: Any, sequences: int) -> TokenBatches:
        # Megatron's first reader of a data set writes an index, which others must not read half written: ranks wait for
        # rank 0 anyway; shards wait for each other here.
        device = self.parent.device  # loads the model before the lock is taken
        lock: AbstractContextManager[object] = nullcontext()
        if self.workspace.shard is not None and data_parallel.number() == 0:
            lock = FileLock(self.workspace.run_dir / LOCKS / "data.lock")
        with lock:
            config = stage_config(self.config, self.description, data_parallel.count())
            return TokenBatches(config, split, sequences, device)

    @cached_property
    def calibration(self) -> list[torch.Tensor]:
        """This rank's batches of the calibration set."""
        return self.tokens("train", self.chosen.calibration)

    @cached_property
    def validation(self) -> list[torch.Tensor]:
        """This rank's batches of the validation set."""
        return self.tokens("valid", self.chosen.evaluation)

    @cached_property
    def initial(self) -> Library:
        """Library of the weights that variants start from."""
        return Library(self.workspace.initial, initial=True)

    @cached_property
    def best(self) -> Library:
        """Library of all variants: trained weights if they were distilled, otherwise the initial ones."""
        return Library(self.workspace.trained) if self.chosen.distill.steps else self.initial

    def library(self) -> None:
        """Build the weights of every variant from the parent's."""
        with data_parallel.progress("library", sum(map(len, self.variants)), "variants") as advance:
            build(
                self.parent,
                self.description,
                self.variants,
                self.initial,
                calibration=self.calibration,
                advance=advance,
            )

    def distill(self) -> None:
        """Train every variant to reproduce its block's output."""
        training = self.chosen.distill
        if not training.steps:
            return
        shard = self.workspace.shard
        by_block = self._of_shard([trainable([each]) for each in self.variants])
        if shard is None or any(by_block):
            self._distill(by_block, self.initial, Library(self.workspace.trained), "distill", shard)

    def _of_shard(self, by_block: Sequence[Sequence[Variant]]) -> Sequence[Sequence[Variant]]:
        """Return this shard's variants, grouped by block; all variants if the stage is not sharded."""
        shard = self.workspace.shard
        if shard is None:
            return by_block
        selected = shard.select(by_block)
        if not any(selected):
            total = sum(map(len, by_block))
            data_parallel.say(f"shard {shard}: there are only {total} variants, so it has nothing to do")
        return selected

    def _distill(
        self,
        by_block: Sequence[Sequence[Variant]],
        initial: Library,
        trained: Library,
        label: str,
        shard: Shard | None = None,
    ) -> None:
        training = self.chosen.distill
        data = self._token_batches("train", training.steps * training.batch)
        folder = training.inputs
        inputs = None if folder is None else BlockInputs(self.workspace.block_inputs(folder))
        with data_parallel.progress(label, training.steps * len(trainable(by_block)), "steps") as advance:
            distill(
                self.parent,
                by_block,
                initial,
                trained,
                lambda step: data.stream(step, training.batch),
                training,
                shard=shard,
                inputs=inputs,
                advance=advance,
            )

    def score(self) -> None:
        """Score every variant by the loss of the parent with the variant in place of its block."""
        scores, whole = self.workspace.scores, self.workspace.shard is None
        order = [(variant.number + 1, variant.name) for each in self.variants for variant in each]
        by_block = self._of_shard(self.variants)
        if whole:
            data_parallel.written(lambda: collect_scores(scores, self.workspace.scores_of_shards(), order))
        else:  # a run without shards may have scored some
            done = data_parallel.agreed(lambda: {(score.block, score.variant) for score in read_scores(scores)})
            by_block = [[v for v in each if (v.number + 1, v.name) not in done] for each in by_block]
        if not any(by_block):
            return
        with data_parallel.progress("score", sum(map(len, by_block)), "variants") as advance:
            score_blocks(
                self.parent,
                by_block,
                partial(self.best.layer, self.parent),
                self.calibration,
                self.workspace.own_scores,
                together=self.chosen.distill.together,
                advance=advance,
            )
        if whole:
            data_parallel.written(lambda: collect_scores(scores, [], order))

    def cost(self) -> None:
        """Write every variant's costs to a CSV file, with measured or given latencies if configured."""
        serving, architecture = self.chosen.serving, self.description.architecture
        costs = Costs(
            outside_costs(architecture, serving),
            {
                (v.number + 1, v.name): (v.block, block_costs(architecture, v.block, serving))
                for each in self.variants
                for v in each
            },
        )
        if self.chosen.measure.table is not None:
            blocks = blocks_to_measure(self.variants)
            costs = _with_latencies(costs, read_table(Path(self.chosen.measure.table), architecture, blocks, serving))
        if not self.chosen.measure.enabled:
            data_parallel.written(lambda: costs.write(self.workspace.costs))
            return
        parent = self.parent  # loading it is collective: on every rank
        data_parallel.written(lambda: self._measured(parent, costs).write(self.workspace.costs))

    def _measured(self, parent: Parent, costs: Costs) -> Costs:
        """Replace the latencies in `costs` by measurements of this rank on this machine."""
        with data_parallel.progress("cost", len(distinct_blocks(self.variants)) + 1, "blocks") as advance:
            measured = measure_blocks(
                parent,
                self.variants,
                partial(initial_layer, parent, self.description),
                self.chosen.serving,
                self.workspace.measured,
                min_seconds=self.chosen.measure.min_seconds,
                advance=advance,
            )
        return _with_latencies(costs, measured)

    def compare(self) -> None:
        """Evaluate the search's choices; the one with the lowest loss on calibration data becomes the child.

        The reported losses are on validation data, which are not used for the selection.
        """
        choices = json.loads((self.workspace.folder / "choices.json").read_text())["choices"]
        rows: list[dict[str, Any]] = [self._row("parent", [each[0] for each in self.variants], self.best)]
        for number, choice in enumerate(choices, start=1):
            picked = self._named(choice["variants"])
            calibration = None
            if len(choices) > 1:
                calibration = evaluate.loss(self.parent, self.calibration, self._replaced(picked, self.best))
            row = self._row(f"choice {number}", picked, self.best)
            rows.append(row | {"score": choice["score"], "calibration_loss": calibration})
        best = min(rows[1:], key=lambda row: row["calibration_loss"]) if len(choices) > 1 else rows[1]
        rows = [_compared(row, rows[0]) for row in rows]
        self._write_json("comparison.json", rows)
        self._write_json("choice.json", best)

    def _write_json(self, name: str, content: Any) -> None:
        """Write a JSON file to the child's folder."""
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
        """Return the named variant of each block; `names` has one name per block, in order."""
        return [next(v for v in each if v.name == name) for each, name in zip(self.variants, names, strict=True)]

    def _replaced(self, picked: Sequence[Variant], library: Library) -> Replaced:
        replaced = {}
        for variant in picked:
            if variant.name != KEEP:
                layer = library.layer(self.parent, variant)
                if layer is not None and self.parent.share is not None:
                    self.parent.share(layer)  # a child replaces many blocks
                replaced[variant.number] = layer
        return replaced

    def _total(self, blocks: Sequence[Block | None], resource: str) -> float:
        """Compute the total of a resource over a model with these blocks."""
        architecture, serving = self.description.architecture, self.chosen.serving
        for block in {*blocks} - self._costs.keys():
            self._costs[block] = block_costs(architecture, block, serving)
        return sum((self._costs[block][resource] for block in blocks), outside_costs(architecture, serving)[resource])

    def baselines(self) -> bool:
        """Evaluate baselines and the result of a search, each limited only by one resource's limit of the child.

        Returns:
            True if baselines.json was written; False if baselines are disabled.
        """
        if not self.chosen.baselines:
            return False
        choices = json.loads((self.workspace.folder / "choices.json").read_text())
        limit = choices["most"]
        cost = partial(self._total, resource=choices["resource"])
        scores = {(score.block, score.variant): score for score in read_scores(self.workspace.scores)}
        metric = self.chosen.search.metric

        def pruned() -> tuple[list[Variant], Library]:
            picked = uniform(self.description.blocks, cost, limit)
            folder = self.workspace.folder / "baselines"
            initial, trained = Library(folder / "initial", initial=True), Library(folder / "trained")
            pairs = [[each[0], variant] for each, variant in zip(self.variants, picked, strict=True)]
            build(self.parent, self.description, pairs, initial, calibration=self.calibration)
            if self.chosen.distill.steps:
                self._distill(pairs, initial, trained, "uniform pruning")
            return picked, trained if self.chosen.distill.steps else initial

        def dropped() -> tuple[list[Variant], Library]:
            return greedy(
                self.variants, lambda v: getattr(scores[v.number + 1, v.name], metric), cost, limit
            ), self.best

        def random_choice(seed: int) -> tuple[list[Variant], Library]:
            return at_random(self.variants, cost, limit, seed), self.best

        parent = json.loads((self.workspace.folder / "comparison.json").read_text())[0]
        chosen = json.loads((self.workspace.folder / "choice.json").read_text())
        rows = []
        if (alone := choices["alone"]) is not None:
            picked = self._named(alone["variants"])
            name = f"search with {choices['resource']} limited alone"
            rows.append(self._row(name, picked, self.best) | {"score": alone["score"]})
        methods: dict[str, Callable[[], tuple[list[Variant], Library]]] = {
            "uniform width pruning": pruned,
            "greedy dropping": dropped,
            "last blocks dropped": lambda: (greedy(self.variants, lambda v: -v.number, cost, limit), self.best),
            **{f"random choice {seed}": partial(random_choice, seed) for seed in range(1, RANDOM_CHOICES + 1)},
        }
        for name, make in methods.items():
            try:
                rows.append(self._row(name, *make()))
            except CannotReach as reason:
                rows.append({"name": name, "cannot": str(reason)})
        compared = [row if "cannot" in row else _compared(row, parent, chosen) for row in rows]
        self._write_json("baselines.json", compared)
        return True

    def realise(self) -> None:
        """Write the child's checkpoint, its notation and its Puzzle block_configs."""
        names = json.loads((self.workspace.folder / "choice.json").read_text())["variants"]
        picked = self._named(names)
        parent = self.whole if self.chosen.mtp == "keep" else self.description
        description = child(parent, picked)
        reader = TorchDistReader(checkpoint_folder(self.workspace.parent))
        work = realise(reader, parent, picked, self.best)
        self._write(self.workspace.weights, work, description, {"choice": names})
        self._write_json("child.json", _as_json(description))

    def _write(self, to: Path, work: Sequence[Work], description: Description, identity: dict[str, Any]) -> None:
        source = self.workspace.parent
        extras = extras_beside(source, checkpoint_folder(source))

        def finish(folder: Path) -> None:
            name = f"{self.config['model']['name']}_{self.workspace.child}"
            write_model_file(folder, to_config(description), name=name, comment=f"A child of {source}.")
            keep_extras(extras, folder)

        def write() -> None:
            write_checkpoint(
                to,
                MEGATRON,
                cut_into_parts(work, SHARD_GIGABYTES),
                identity={**identity, "model": to_config(description)},
                finish=finish,
                arguments=megatron_arguments(description.architecture),
            )

        data_parallel.written(write)

    def fuse(self) -> bool:
        """Measure the dependencies between the child's blocks, and fuse runs of FFN blocks.

        Returns:
            True if a fused checkpoint was written; False if fusion is disabled or no blocks can be fused.
        """
        chosen = self.chosen.fuse
        description = description_of(self.workspace.weights)
        if not chosen.enabled:
            return False
        opened = self.open(self.workspace.weights, description)
        file = self.workspace.folder / "dependency.jsonl"
        with data_parallel.progress(
            "dependency", (len(description.blocks) - 1) * len(self.calibration), "passes"
        ) as advance:
            matrix = measure_dependency(opened, self.calibration, file, advance=advance)
        groups: list[Group] = []
        if description.architecture.norm_placement != "input":
            reason = "norms on outputs cannot be folded into FFN blocks, so nothing is fused"
        elif not runs(description):
            reason = "no two FFN blocks are adjacent, so there is nothing to fuse"
        else:
            reason = "the limits of puzzle.fuse exclude all groups"
            limits = {name: value for name, value in asdict(chosen).items() if name != "enabled"}
            groups = plan(description, dependency=matrix, precision=self.chosen.serving.precision, **limits)
        picture = self.workspace.folder / "dependency.png"
        title = f"{self.workspace.child}: dependency of blocks on earlier ones"
        pattern = description.architecture.pattern
        data_parallel.written(lambda: draw_dependency(matrix, picture, pattern=pattern, groups=groups, title=title))
        if not groups:
            data_parallel.say(f"fuse: {reason}")
            return False
        reader = TorchDistReader(checkpoint_folder(self.workspace.weights))
        self._write(
            self.workspace.fused,
            fuse(reader, description, groups),
            fused(description, groups),
            {"groups": [[group.first, group.last] for group in groups]},
        )
        return True

    def evaluate(self) -> None:
        """Measure loss and speed of the child in every state, compared with the parent in the same run."""
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
            description = description_of(checkpoint).without_prediction()
            opened = self.parent if name == "parent" else self.open(checkpoint, description)
            models = [self.parent] if opened is self.parent else [self.parent, opened]
            measured = evaluate.forward_seconds(models, tokens)
            parent_seconds, seconds = measured[0], measured[-1]
            rows.append(
                {
                    "name": name,
                    "loss": fmean(losses := evaluate.losses(opened, self.validation)),
                    "losses": losses,
                    "bytes": read_bytes,
                    "predicted": predicted,
                    "blocks": len(description.blocks),
                    "forward_seconds": median(seconds),
                    "speedups": [parent / own for parent, own in zip(parent_seconds, seconds, strict=True)],
                    "tokens": tokens.numel(),
                    "costs": {r: self._total(description.blocks, r) for r in RESOURCES},
                    "pattern": format_pattern(description.architecture.pattern),
                }
            )
            del opened  # free it before the next one is loaded
        self._write_json("evaluation.json", [_compared(row, rows[0]) for row in rows])

    def _bytes(self) -> int | None:
        """Count the bytes of text behind the validation set's predicted tokens; None if the config has no tokenizer."""
        tokenizer = (self.config.get("data") or {}).get("tokenizer")
        if tokenizer is None:
            return None
        loaded = load_tokenizer(tokenizer)
        texts = (loaded.decode(row[1:].tolist()) for tokens in self.validation for row in tokens)
        return int(data_parallel.summed(torch.tensor(sum(len(text.encode(errors="replace")) for text in texts))))


def _with_latencies(costs: Costs, latencies: Mapping[str, Measured] | Mapping[str, Latency]) -> Costs:
    """Replace the latencies in `costs` with measured ones, which are keyed by `block_key`; no-ops have none."""
    return Costs(
        measured_costs(costs.outside, latencies[OUTSIDE]),
        {
            key: (block, own if block is None else measured_costs(own, latencies[block_key(block)]))
            for key, (block, own) in costs.variants.items()
        },
    )


def _compared(
    row: dict[str, Any], parent: Mapping[str, Any], chosen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an evaluation's row with the paired differences of its sequences' losses from those of other models.

    Args:
        row: results of the evaluated model, with `losses` per sequence.
        parent: the parent's results; the difference is added as `from_parent`.
        chosen: the chosen child's results, likewise for `from_child`; None to omit it.
    """
    sides = {"from_parent": parent, "from_child": chosen}
    return row | {
        name: asdict(difference(side["losses"], row["losses"], seed=1234)) for name, side in sides.items() if side
    }


def _as_json(description: Description) -> dict[str, Any]:
    """Return a child's blocks as JSON: in pattern notation and as Puzzle's block_configs.

    If block_configs cannot express them, it is null and `block_configs_missing` gives the reason.
    """
    pattern = description.architecture.pattern
    sizes = to_config(description)["megatron"]
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
