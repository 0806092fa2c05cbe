"""Folder layout of a compression, and the records of its finished stages. Does not import torch.

RUN_DIR/parent/            training run of the parent, if the job trains it
RUN_DIR/blocks/            shared by all children: variants and their scores
RUN_DIR/CHILD/             one child: costs, search, weights, fusion, healing, report
RUN_DIR/CHILD/shards/IofN/ config and logs of a stage's shard; its results are stored with the whole stage's
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nemo_ext.checkpoint.torch_dist import METADATA, checkpoint_folder
from nemo_ext.job.made_of import check_same, differing, digest, note, noted
from nemo_ext.job.run_directory import CONFIG
from nemo_ext.megatron.settings import TrainSettings
from nemo_ext.puzzle.settings import Settings
from nemo_ext.puzzle.stages.shards import Shard

STAGES: Mapping[str, tuple[str, ...]] = {
    "parent": (),
    "library": ("parent",),
    "distill": ("library",),
    "score": ("distill",),
    "cost": ("parent",),
    "search": ("score", "cost"),
    "front": ("search",),
    "compare": ("search",),
    "baselines": ("compare",),
    "realise": ("compare",),
    "fuse": ("realise",),
    "heal": ("fuse",),
    "pretrain": ("heal",),
    "evaluate": ("pretrain",),
    "export": ("pretrain",),
    "report": ("evaluate",),
}
"""Stages in order, each with the stages whose results it uses."""

SHARED = ("parent", "library", "distill", "score")
"""Stages whose results are shared by all children."""

RENEWED = ("front", "evaluate", "report")
"""Stages that only read and report; they are run again when their settings or earlier results have changed."""

MODEL = "model"
"""Name of the link in a child's folder to its newest checkpoint."""

BOOKKEEPING = re.compile(r"(save|log|eval|tensorboard|wandb|exit|non_persistent|async)_|num_workers$|timing_log")
"""Megatron flags that do not affect what a training run learns."""


class Workspace:
    """Paths of a compression, and its records of finished stages.

    Attributes:
        run_dir: root folder.
        shard: shard of the stage that this command runs; None for the whole stage.
        parent: run directory or checkpoint of the parent.
        blocks: folder of variants and scores, shared by all children.
        initial: library of variants with weights initialised from the parent.
        trained: library of trained variants.
        scores: file of replace-one-block scores.
        own_scores: file of the scores that this command computes: the shard's file if there is a shard, else `scores`.
        folder: the child's folder.
        config: composed config of the last command; logs are in the same folder.
        costs: file with every variant's costs.
        measured: file of measured latencies.
        weights: the child's checkpoint before fusion.
        fused: the child's checkpoint after fusion, if blocks were fused.
        healed: run that distils the parent into the child.
        pretrained: training run that continues after healing.
        exported: the child in Hugging Face format.
        model: link to the child's newest checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], chosen: Settings) -> None:
        """Derive the paths from a composed config and its checked `puzzle` section."""
        self._identity = _identity(config, json.loads(TypeAdapter(Settings).dump_json(chosen)))
        self.run_dir, self.child = Path(config["run_dir"]), chosen.child
        self.shard = None if chosen.shard is None else Shard.parse(chosen.shard)
        self.parent = Path(chosen.parent) if chosen.parent else self.run_dir / "parent"
        self.blocks, self.folder = self.run_dir / "blocks", self.run_dir / chosen.child
        self.initial, self.trained = self.blocks / "initial", self.blocks / "trained"
        self.scores = self.own_scores = self.blocks / "scores.jsonl"
        self.config = self.folder / CONFIG
        if self.shard is not None:
            self.own_scores = self.blocks / f"scores_{self.shard.label}.jsonl"
            self.config = self.folder / "shards" / self.shard.label / CONFIG
        self.costs, self.measured = self.folder / "costs.csv", self.folder / "measured.jsonl"
        self.weights, self.fused = self.folder / "weights", self.folder / "fused"
        self.healed, self.pretrained = self.folder / "heal", self.folder / "pretrain"
        self.exported, self.model = self.folder / "huggingface", self.folder / MODEL

    def block_inputs(self, folder: str) -> Path:
        """Return this distillation's own subfolder of `folder` for block inputs, named by its settings and shard."""
        made_of = digest([str(self.folder.resolve()), self._now("distill")])[:16]
        return Path(folder) / (made_of if self.shard is None else f"{made_of}_{self.shard.label}")

    def scores_of_shards(self) -> list[Path]:
        """List the shards' existing score files."""
        return sorted(self.blocks.glob("scores_*of*.jsonl"))

    def realised(self) -> Path:
        """Return the child's checkpoint before healing: the fused one if it exists, otherwise `weights`."""
        return self.fused if self.fused.is_dir() else self.weights

    def newest(self) -> Path:
        """Return the child's newest checkpoint or run: further training, healing, or `realised`."""
        runs = (self.pretrained, self.healed)
        return next((run for run in runs if (run / "checkpoints").is_dir()), self.realised())

    def link(self) -> None:
        """Point the link `model` at the child's newest checkpoint, if there is one."""
        newest = self.newest()
        if newest.is_dir():
            self.model.unlink(missing_ok=True)
            self.model.symlink_to(newest.relative_to(self.folder))

    def record(self, stage: str) -> Path:
        """Return the path of a stage's completion record."""
        return (self.blocks if stage in SHARED else self.folder) / "stages" / f"{stage}.json"

    def is_finished(self, stage: str) -> bool:
        """Return whether a stage, or this shard of it, was finished with the same settings and inputs.

        Raises:
            ValueError: it was begun or finished with other settings or inputs. A stage that had nothing to do or only
                reports is run again instead.
        """
        finished = self.record(stage).is_file()
        shards = self._shards(stage)
        if not all(
            self._fits(stage, file, finished=finished)
            for file in ([self.record(stage)] if finished else [self._begun(stage), *shards.values()])
            if file.is_file()
        ):
            return False
        if finished and stage == "parent":
            self._check_parent(json.loads(self.record(stage).read_text()))
        own = None if self.shard is None else shards.get(self.shard)
        return finished or (own is not None and self._is_done(own))

    def _fits(self, stage: str, file: Path, *, finished: bool) -> bool:
        """Return True if a record has the current settings and inputs; False if not, but the stage may be run again.

        The record is the stage's or a shard's; the error message says whether it is `finished` or was only begun.
        """
        record, now = json.loads(file.read_text()), self._now(stage)
        before, after = (_without_defaults(each["settings"]) for each in (record, now))
        if not differing(before, after) and record["made_from"] == now["made_from"]:
            return True
        if stage in RENEWED or record.get("empty"):
            return False
        state, advice = "done" if finished else "begun", self._advice(stage)
        check_same(before, after, f"{file}: {stage} was {state} with other settings", advice)
        raise ValueError(f"{file}: {stage} was {state} from results that have been replaced since; {advice}")

    def begin(self, stage: str) -> None:
        """Record the settings of a stage, or shard, that is starting, so that it is not resumed with others.

        Raises:
            ValueError: the stage was split into a different number of shards.
        """
        if self.shard is None:
            note(self._begun(stage), self._now(stage))
            return
        counts = {shard.count for shard in self._shards(stage)} - {self.shard.count}
        if counts:
            raise ValueError(
                f"puzzle.shard={self.shard}: {stage} was begun in {counts.pop()} shards; keep that number, or omit "
                "puzzle.shard to finish the rest in one process"
            )
        self._write_shard(stage, done=False)

    def finish(self, stage: str, *, empty: bool = False) -> None:
        """Record that a stage is finished; if it had nothing to do (`empty`), it may run with other settings later."""
        if self.shard is not None:
            self._write_shard(stage, done=True)
            return
        record = {**self._now(stage), "empty": empty}
        if stage == "parent":
            record["checkpoint"] = _fingerprint(checkpoint_folder(self.parent))
        note(self.record(stage), record)
        self._begun(stage).unlink(missing_ok=True)
        for file in self._shards(stage).values():
            file.unlink()

    def unfinished_shards(self, stage: str) -> list[Shard]:
        """List a stage's unfinished shards; empty if it was not begun in shards."""
        shards = self._shards(stage)
        every = {Shard(number, shard.count) for shard in shards for number in range(shard.count)}
        return sorted(shard for shard in every if shard not in shards or not self._is_done(shards[shard]))

    def missing(self, stage: str) -> list[str]:
        """List the unfinished stages whose results a stage needs."""
        return [need for need in STAGES[stage] if not self.record(need).is_file()]

    def _begun(self, stage: str) -> Path:
        return self.record(stage).with_suffix(".begun.json")

    def _shards(self, stage: str) -> dict[Shard, Path]:
        """Return a stage's shards and their records, which are removed when the whole stage is finished."""
        return {Shard.from_label(file): file for file in self.record(stage).parent.glob(f"{stage}.shard_*.json")}

    def _is_done(self, shard: Path) -> bool:
        return bool(noted(shard)["done"])

    def _write_shard(self, stage: str, *, done: bool) -> None:
        assert self.shard is not None
        file = self.record(stage).with_name(f"{stage}.shard_{self.shard.label}.json")
        note(file, {**self._now(stage), "done": done})

    def _now(self, stage: str) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(json.dumps(self._identity[stage]))
        return {"settings": settings, "made_from": {need: _digest(self.record(need)) for need in STAGES[stage]}}

    def _check_parent(self, record: Mapping[str, Any]) -> None:
        now = _fingerprint(checkpoint_folder(self.parent))
        message = f"the parent {self.parent} has changed since the library was begun"
        check_same(record["checkpoint"], now, message, self._advice("parent"))

    def _advice(self, stage: str) -> str:
        if stage in SHARED:
            return f"choose another run_dir, or remove {self.run_dir} to start over"
        if stage == "export":
            return f"remove {self.record(stage)} and {self.exported} to export again"
        return f"give the child another name (puzzle.child=...), or remove {self.folder} to make it again"


def _without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's settings without default `train` keys, which records of earlier versions may not contain."""
    if "train" not in settings:
        return dict(settings)
    defaults = {field.name: field.default for field in fields(TrainSettings)}
    train = {key: value for key, value in settings["train"].items() if key not in defaults or value != defaults[key]}
    return {**settings, "train": train}


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None


def _fingerprint(folder: Path) -> dict[str, Any]:
    """Identify a checkpoint by its files, without reading its tensors."""
    files = [file.stat() for file in folder.iterdir() if file.is_file()]
    return {
        "folder": str(folder.resolve()),
        "metadata": _digest(folder / METADATA),
        "bytes": sum(file.st_size for file in files),
        "changed": max(file.st_mtime_ns for file in files),
    }


def _identity(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a mapping from each stage to the settings that determine its results."""

    def part(*names: str) -> dict[str, Any]:
        return {name: section[name] for name in names}

    megatron = {key: value for key, value in config["megatron"].items() if not BOOKKEEPING.match(key)}
    data = {key: value for key, value in (config.get("data") or {}).items() if key != "workers"}
    parent: dict[str, Any] = {"data": data}
    if section["parent"]:
        read = ("seq_length", "seed", "split", "mock_data", "train_data_path", "valid_data_path", "bf16", "fp16")
        parent |= {"given": True, "megatron": {name: megatron.get(name) for name in read}}
    else:
        parent |= {"model": config["model"], "megatron": megatron, "train": config["train"]}
    search, heal = dict(section["search"]), dict(section["heal"])
    sweep, continued = search.pop("sweep"), heal.pop("continue_tokens")
    measure = dict(section["measure"])
    table = measure.pop("table")
    cost = part("serving") | {"measure": measure} | ({"latencies": _digest(Path(table))} if table else {})
    schedule = {name: heal[name] for name in ("lr", "warmup_tokens", "megatron")}
    return {
        "parent": parent,
        "library": part("variants", "calibration"),
        "distill": {"distill": {name: value for name, value in section["distill"].items() if name != "inputs"}},
        "score": part("calibration"),
        "cost": cost,
        "search": {"search": search},
        "front": {"search": search, "sweep": sweep},
        "compare": part("evaluation", "calibration"),
        "baselines": part("baselines", "evaluation"),
        "realise": {"mtp": None if section["mtp"] == "keep" else section["mtp"]},
        "fuse": part("fuse", "calibration"),
        "heal": {"heal": heal, "megatron": megatron},
        "pretrain": {"continue_tokens": continued, "heal": schedule, "megatron": megatron},
        "evaluate": part("evaluation"),
        "export": part("export"),
        "report": {},
    }
