"""The puzzle job: makes a parent, its block library and one child, stage by stage. The same command resumes it.

Training runs (`parent`, `heal`) are those of `nemo-ext train`. Stages that run a model start `launcher.nproc_per_node`
processes (`nemo_ext.puzzle.rank`) on each node. Search and report run in this process.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from nemo_ext import launch
from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.checkpoint.start import as_checkpoint, description_of
from nemo_ext.data.training import check_validation, tokenize_streams, with_data
from nemo_ext.job.files import only_run_in
from nemo_ext.job.progress import notice
from nemo_ext.job.rank import check_machine, start
from nemo_ext.job.run_directory import last_checkpoint, write_config, write_versions
from nemo_ext.job.settings import nearest
from nemo_ext.megatron import versions
from nemo_ext.megatron.arguments import world_size
from nemo_ext.puzzle.choice.choose import Costs, choose, draw_front, state_problem
from nemo_ext.puzzle.choice.problem import Problem
from nemo_ext.puzzle.configs import healing_run, logits_saving_run, parent_run
from nemo_ext.puzzle.latencies import blocks_to_measure, read_table
from nemo_ext.puzzle.report import write_report
from nemo_ext.puzzle.score_file import read_scores
from nemo_ext.puzzle.settings import Settings, settings
from nemo_ext.puzzle.stages.shards import Shard, only_shard_in, refuse_beside_shards
from nemo_ext.puzzle.variants import variants
from nemo_ext.puzzle.workspace import STAGES, Workspace

ON_RANKS = ("library", "distill", "score", "cost", "compare", "baselines", "realise", "fuse", "evaluate")


def run(config: dict[str, Any]) -> None:
    """Run the stages selected in the config, skipping finished ones.

    Args:
        config: composed config, from `compose("puzzle", ...)`.

    Raises:
        ValueError: the config is invalid, or no choice of variants meets the limits.
        SystemExit: a rank failed, or the user interrupted the job.
    """
    Job(config).run()


def check(config: Mapping[str, Any]) -> Settings:
    """Check a composed config before any stage runs, and return its settings; input files may not exist yet.

    Raises:
        ValueError: a setting, stage or child name is invalid, packs have no validation set, or `puzzle.measure.table`
            does not match the settings.
    """
    chosen = settings(config["puzzle"])
    if chosen.child in ("parent", "blocks"):
        raise ValueError(f"puzzle.child={chosen.child}: this folder holds other results; choose another name")
    for stage in chosen.stages or ():
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r} in puzzle.stages: {nearest(stage, STAGES)}")
    if any(chosen.runs(stage) for stage in ("compare", "baselines", "evaluate")):
        check_validation(config, "puzzle")
    ranks, selected = world_size(config), {*(STAGES if chosen.stages is None else chosen.stages)}
    if "distill" in selected and chosen.distill.steps and chosen.distill.batch % ranks:
        raise ValueError(
            f"puzzle.distill.batch={chosen.distill.batch} is not divisible by the {ranks} ranks; set it to a multiple"
        )
    for name, data, stages in (
        ("calibration", chosen.calibration, {"library", "score", "compare", "baselines", "fuse"}),
        ("evaluation", chosen.evaluation, {"compare", "baselines", "evaluate"}),
    ):
        if selected & stages and data.sequences <= data.batch * (ranks - 1):
            raise ValueError(
                f"puzzle.{name}.sequences={data.sequences} must be above {data.batch * (ranks - 1)}, as each of the "
                f"{ranks} ranks needs a batch (puzzle.{name}.batch={data.batch})"
            )
        batches = ceil(data.sequences / data.batch)
        if chosen.fsdp is not None and selected & stages and batches % ranks:
            raise ValueError(
                f"puzzle.{name} has {batches} batches for {ranks} ranks, but puzzle.fsdp requires the same number on "
                f"every rank: change sequences or batch so that {ranks} divides the number of batches"
            )
    if "cost" in selected and chosen.measure.table is not None and Path(chosen.measure.table).is_file():
        parent = from_config(config) if chosen.parent is None else None
        if chosen.parent is not None:
            with suppress(ValueError):  # a job may still make it
                parent = description_of(Path(chosen.parent))
        if parent is not None:
            _read_table(chosen, parent)
    return chosen


def _read_table(chosen: Settings, parent: Description) -> None:
    assert chosen.measure.table is not None
    blocks = blocks_to_measure(variants(parent.architecture, chosen.variants))
    read_table(Path(chosen.measure.table), parent.architecture, blocks, chosen.serving)


class Job:
    """A compression job, which runs its stages in order."""

    def __init__(self, config: dict[str, Any]) -> None:
        check_machine(config)
        self.chosen: Settings = check(config)
        if self.chosen.parent is not None:
            if not Path(self.chosen.parent).exists():
                raise ValueError(
                    f"puzzle.parent={self.chosen.parent}: no such run, checkpoint or converted folder; train or "
                    "convert it first"
                )
            config = as_checkpoint(config, Path(self.chosen.parent))
        self.config = with_data(config)
        self.workspace = Workspace(self.config, self.chosen)
        if (
            self.chosen.heal.teacher == "cached"
            and self.chosen.runs("heal")
            and (why := versions.lack(["logits_save_dir"]))
        ):
            raise versions.TooOld(f"puzzle.heal.teacher=cached is not supported: {why}; set it to online")

    def run(self) -> None:
        """Run the stages, or one shard of a stage."""
        if self.workspace.shard is not None:
            self._run_shard(self.workspace.shard)
            return
        with only_run_in(self.workspace.run_dir):
            refuse_beside_shards(self.workspace.run_dir)
            selected = [stage for stage in STAGES if self.chosen.runs(stage)]
            self._check()
            self._write_config()
            if any(stage in ON_RANKS for stage in selected):
                tokenize_streams(self.config.get("data"))
            for on_ranks, group in groupby(selected, key=lambda stage: stage in ON_RANKS):
                for stages in [list(group)] if on_ranks else [[stage] for stage in group]:
                    self._run_stages(stages)
            self.workspace.link()

    def _run_shard(self, shard: Shard) -> None:
        assert self.chosen.stages is not None
        (stage,) = self.chosen.stages

        def begin() -> None:
            self._check()
            if missing := self.workspace.missing(stage):
                raise ValueError(
                    f"puzzle.shard={shard}: {stage} needs the output of {' and '.join(missing)}; finish that first, "
                    "without puzzle.shard"
                )
            if not self.workspace.is_finished(stage):
                self.workspace.begin(stage)

        with only_shard_in(self.workspace.run_dir, shard, begin):
            self._write_config()
            tokenize_streams(self.config.get("data"))
            self._run_stages([stage])
            if left := self.workspace.unfinished_shards(stage):
                notice(f"{stage}: shards {', '.join(map(str, left))} are not finished yet")
            else:
                notice(f"{stage}: all shards are finished; continue without puzzle.shard")

    def _check(self) -> None:
        """Raise ValueError if existing results do not match the config, before any work is done."""
        for stage in STAGES:
            self.workspace.is_finished(stage)

    def _write_config(self) -> None:
        """Write the config that ranks read."""
        folder = self.workspace.config.parent
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, self.config)
        write_versions(folder, sys.argv)

    def _run_stages(self, stages: Sequence[str]) -> None:
        """Run the unfinished ones among consecutive stages.

        The stages are either several that run on ranks, which are started once for all of them, or one other stage.
        """
        todo = [stage for stage in stages if not self.workspace.is_finished(stage)]
        for stage in stages:
            if stage not in todo:
                notice(f"{self._label(stage)}: finished before")
        if not todo:
            return
        for number, stage in enumerate(todo):
            missing = [need for need in self.workspace.missing(stage) if need not in todo[:number]]
            if missing:
                raise ValueError(
                    f"puzzle.stages: {stage} needs the unfinished output of {' and '.join(missing)}; add it to the list"
                )
            if self.workspace.shard is None and (left := self.workspace.unfinished_shards(stage)):
                notice(
                    f"{stage}: shards {', '.join(map(str, left))} are not finished; the rest of their work is done here"
                )
        if self.chosen.measure.table is not None and "cost" in todo:  # before ranks start
            _read_table(self.chosen, description_of(self.workspace.parent))
        began = time.monotonic()
        if todo[0] in ON_RANKS:
            start("nemo_ext.puzzle.rank", self.workspace.config, *todo, ranks=world_size(self.config))
        else:
            (stage,) = todo
            method: Callable[[], bool | None] = getattr(self, f"_{stage}")
            if stage != "report":
                self.workspace.begin(stage)
            empty = method() is False
            if stage != "report":
                self.workspace.finish(stage, empty=empty)
        notice(f"{', '.join(map(self._label, todo))}: done in {time.monotonic() - began:.0f} s")

    def _label(self, stage: str) -> str:
        return stage if self.workspace.shard is None else f"{stage}, shard {self.workspace.shard}"

    def _parent(self) -> None:
        if self.chosen.parent is None:
            self._train(parent_run(self.config, self.workspace.parent))
        parent = description_of(self.workspace.parent)
        if self.chosen.mtp == "drop":
            parent = parent.without_prediction()
        if self.chosen.heal.tokens and self.chosen.runs("heal"):
            # Find an invalid flag now rather than after all other stages.
            from nemo_ext.megatron import check as megatron_check

            run = self._run(self.workspace.healed, self.workspace.parent, self.chosen.heal.tokens, None, parent)
            megatron_check.check(run)

    def _problem(self) -> Problem:
        scores = read_scores(self.workspace.scores)
        return state_problem(scores, Costs.read(self.workspace.costs), self.chosen.search, self.chosen.serving)

    def _search(self) -> None:
        try:
            choose(self._problem(), self.chosen.search, self.workspace.folder)
        except (TimeoutError, RuntimeError) as error:
            raise ValueError(f"puzzle.search failed: {error}") from error

    def _front(self) -> bool:
        title = f"{self.config['model']['name']}: the best children"
        return draw_front(self._problem(), self.chosen.search, self.workspace.folder, title=title)

    def _heal(self) -> bool:
        heal = self.chosen.heal
        if not heal.tokens:
            return False
        run = partial(self._run, self.workspace.healed, self.workspace.realised(), heal.tokens)
        if heal.teacher == "online":
            teacher = {name: getattr(heal, name) for name in ("kl_weight", "lm_weight", "temperature", "top_k")}
            self._train(run({"teacher": str(self.workspace.parent), **teacher}))
        else:
            saved = self._cached_teacher()
            flags = {"logits_load_dir": str(saved), "logits_load_kd_loss_alpha": heal.kl_weight}
            child_run = run(None)
            self._train({**child_run, "megatron": {**child_run["megatron"], **flags}})
        return True

    def _pretrain(self) -> bool:
        tokens = self.chosen.heal.continue_tokens
        if tokens:
            start = self.workspace.healed if self.chosen.heal.tokens else self.workspace.realised()
            self._train(self._run(self.workspace.pretrained, start, tokens, None))
        return bool(tokens)

    def _train(self, config: dict[str, Any]) -> None:
        """Train until the last step; raises ValueError if the run stopped early."""
        launch.train(config)
        run_dir, steps = Path(config["run_dir"]), int(config["megatron"]["train_iters"])
        done = last_checkpoint(run_dir) or 0
        if done < steps:
            raise ValueError(
                f"the run in {run_dir} stopped at step {done} of {steps} because of a signal, a time limit or "
                "megatron.exit_interval: run the same command to resume it"
            )

    def _run(
        self,
        run_dir: Path,
        start: Path,
        tokens: float,
        distillation: Mapping[str, Any] | None,
        description: Description | None = None,
    ) -> dict[str, Any]:
        return healing_run(
            self.config,
            description or description_of(start),
            self.chosen.heal,
            run_dir=run_dir,
            start=start,
            tokens=tokens,
            distillation=distillation,
        )

    def _cached_teacher(self) -> Path:
        """Save the teacher's most probable tokens for all sequences used in healing, and return their folder."""
        heal, folder = self.chosen.heal, self.workspace.folder / "teacher"
        assert heal.top_k is not None
        parent = description_of(self.workspace.parent).without_prediction()
        run = self._run(folder, self.workspace.parent, heal.tokens, None, parent)
        self._train(logits_saving_run(run, folder / "logits", heal.top_k))
        return folder / "logits"

    def _export(self) -> bool:
        if not self.chosen.export:
            return False
        from nemo_ext.checkpoint import hf

        source, options = self.workspace.newest(), hf.Settings()
        try:
            conversion = hf.plan(source, self.workspace.exported, options)
        except ValueError:
            if not description_of(source).prediction:
                raise
            options = hf.Settings(mtp="drop")
            conversion = hf.plan(source, self.workspace.exported, options)
            notice(
                "note: the child is exported without multi-token prediction, as no Hugging Face format has both it "
                f"and the child's blocks; {source} keeps it"
            )
        for remark in conversion.remarks:
            notice(f"note: {remark}")
        hf.convert(conversion, options)
        return True

    def _report(self) -> None:
        notice(f"report: {write_report(self.workspace, self.chosen)}")
