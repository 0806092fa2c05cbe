"""Export of a finished run's model to Hugging Face format with NeMo-RL's own converters.

RUN_DIR/finished.json    last training step and the planned steps; marks a run that must not be resumed
RUN_DIR/model            model and tokenizer of the selected checkpoint; written as .model and then renamed
"""

import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice
from nemo_ext.rl.lora import merge_saved
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.checkout import Checkout, Section
from nemo_ext.rl.nemo_rl.render import ALL

MODEL, FINISHED, LOG = "model", "finished.json", "convert.log"
_BIN = "pytorch_model.bin"


@dataclass(frozen=True)
class Saved:
    """A complete NeMo-RL checkpoint.

    Attributes:
        step: step after which it was saved.
        path: folder `.../step_N`.
        info: contents of training_info.json; metrics have their full names, such as `val:accuracy`.
    """

    step: int
    path: Path
    info: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        """Folder with the policy's weights in the backend's format."""
        return self.path / "policy" / "weights"


def saved_in(folder: Path) -> list[Saved]:
    """Return a run's complete checkpoints, sorted by step; unfinished ones are called `tmp_step_N`."""
    checkpoints = []
    for path in folder.glob("step_*"):
        info = path / "training_info.json"
        if re.fullmatch(r"step_\d+", path.name) and info.is_file() and any((path / "policy" / "weights").glob("*")):
            checkpoints.append(Saved(int(path.name.removeprefix("step_")), path, json.loads(info.read_text())))
    return sorted(checkpoints, key=lambda saved: saved.step)


def chosen(saved: Sequence[Saved], checkpointing: Mapping[str, Any]) -> Saved | None:
    """Return the checkpoint to export: the best if the run keeps the best ones, else the last; None if there is none.

    `saved` are the run's checkpoints, and `checkpointing` is that section of NeMo-RL's master config.
    It is selected as in NeMo-RL's `CheckpointManager.get_best_checkpoint_path`. Among equals the last is taken, as on
    NeMo-RL's main branch. The function in 0.5 fails if a checkpoint does not have the metric.
    """
    metric, keep = checkpointing.get("metric_name"), checkpointing.get("keep_top_k")
    if metric and keep and keep < ALL:
        sign = 1 if checkpointing.get("higher_is_better") else -1
        measured = [each for each in saved if not math.isnan(float(each.info.get(metric, math.nan)))]
        if measured:
            return max(measured, key=lambda each: (sign * each.info[metric], each.step))
        notice(f"no checkpoint has the metric {metric}, so the last checkpoint is used")
    return saved[-1] if saved else None


def finished_step(run_dir: Path, master: Mapping[str, Any], section: Section) -> int | None:
    """Return the last training step of a finished run; None if the run should be started or resumed.

    A run is finished at `max_num_steps`, or if it ended earlier under the same plan because its data or epochs were
    exhausted or a threshold was reached.
    """
    saved = saved_in(Path(master["checkpointing"]["checkpoint_dir"]))
    if not saved:
        return None
    last = saved[-1].step
    if last >= master[section]["max_num_steps"] or _read_record(run_dir) == _record(last, master, section):
        return last
    return None


def has_model(run_dir: Path, step: int, master: Mapping[str, Any], section: Section) -> bool:
    """Return whether RUN_DIR/model exists and belongs to the training that ended at `step`.

    `master` is NeMo-RL's master config, and `section` the algorithm's section in it.
    """
    return _read_record(run_dir) == _record(step, master, section) and (run_dir / MODEL).is_dir()


def leave_model(
    run_dir: Path,
    step: int,
    master: Mapping[str, Any],
    section: Section,
    root: Path,
    template: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Record that training ended at a step, and convert the selected checkpoint to RUN_DIR/model.

    If the conversion fails, there is no RUN_DIR/model, and a notice names the checkpoint and a command to convert it.

    Args:
        section: the algorithm's section in the master config.
        template: chat template used in training (see `Template.load`); None for the tokenizer's own.
    """
    if _read_record(run_dir) != _record(step, master, section):
        # An existing model belongs to other steps; remove it before the record changes.
        shutil.rmtree(run_dir / MODEL, ignore_errors=True)
        write_text(run_dir / FINISHED, json.dumps(_record(step, master, section)) + "\n")
    best = chosen(saved_in(Path(master["checkpointing"]["checkpoint_dir"])), master["checkpointing"])
    if best is None:
        notice(
            f"{run_dir}: the run has no checkpoint, so no {MODEL} is written; set "
            "nemo_rl.set.checkpointing.enabled=true to save one"
        )
        return
    unfinished = run_dir / f".{MODEL}"
    shutil.rmtree(unfinished, ignore_errors=True)
    notice(f"{best.path}: converting to {run_dir / MODEL}")
    try:
        _convert(best, unfinished, master["policy"], root, run_dir / LOG, template, config or {})
        unfinished.rename(run_dir / MODEL)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        notice(
            f"training is finished, but {best.path} could not be converted to {run_dir / MODEL}: {reason}. Rerun the "
            f"command to try again, or run NeMo-RL's converter: {command(best, run_dir / MODEL, root)}"
        )
        return
    notice(f"model of step {best.step}: {run_dir / MODEL}")


def command(saved: Saved, to: Path, root: Path) -> str:
    """Return the shell command that converts a checkpoint to Hugging Face format in the folder `to`.

    It runs a converter of NeMo-RL's checkout at `root`, as described in its docs/design-docs/checkpointing.md.
    """
    iteration = _iteration(saved)
    name, extra = ("dcp", []) if iteration is None else ("megatron", ["--extra", "mcore"])
    words = ["uv", "run", *extra, "python", f"examples/converters/convert_{name}_to_hf.py"]
    paths = {
        "config": saved.path / "config.yaml",
        f"{name}-ckpt-path": saved.weights if iteration is None else iteration,
        "hf-ckpt-path": to,
    }
    options = [f"--{key}={path.absolute()}" for key, path in paths.items()]
    return f"cd {shlex.quote(str(root))} && {shlex.join([*words, *options])}"


def _convert(
    saved: Saved,
    to: Path,
    policy: Mapping[str, Any],
    root: Path,
    log: Path,
    template: str | None,
    config: Mapping[str, Any],
) -> None:
    if ((policy.get("megatron_cfg") or {}).get("peft") or {}).get("enabled") and policy["megatron_cfg"].get("enabled"):
        raise ValueError(
            "Megatron saves only the adapters; merge them with NeMo-RL's examples/converters/convert_lora_to_hf.py, as "
            "in NeMo-RL's docs/design-docs/checkpointing.md"
        )
    own_tokenizer = saved.path / "policy" / "tokenizer"
    tokenizer = str(own_tokenizer) if own_tokenizer.is_dir() else str(policy["tokenizer"]["name"])
    iteration = _iteration(saved)
    adapter = next((path.parent for path in saved.weights.rglob("adapter_config.json")), None)
    consolidated = next((path for path in saved.weights.rglob("consolidated") if any(path.glob("*.safetensors"))), None)
    if iteration is not None:
        compat.convert_megatron(root, saved.path / "config.yaml", iteration, to, log)
    elif adapter is not None:
        model = str(policy["model_name"])
        merge_saved(model, adapter, to, trust_remote_code=may_run_code(model, config))
    elif consolidated is not None:
        shutil.copytree(consolidated, to)
    elif any(saved.weights.rglob("*.safetensors")) and not any(saved.weights.rglob(".metadata")):
        raise ValueError(
            "NeMo-RL cannot convert safetensors shards; join them with nemo_automodel's tools/offline_hf_consolidation"
            ".py, or train with nemo_rl.set.checkpointing.save_consolidated=true, which saves whole models"
        )
    elif not (saved.weights / ".metadata").exists() and not Checkout(root).converts_dtensor_v2:
        raise ValueError(
            "this NeMo-RL only converts checkpoints of DTensor's first version (policy.dtensor_cfg._v2=false); train "
            "with nemo_rl.set.checkpointing.save_consolidated=true, which saves whole models"
        )
    else:
        overrides = policy.get("hf_overrides") or policy.get("hf_config_overrides") or {}
        compat.convert_dcp(saved.weights, to, str(policy["model_name"]), tokenizer, overrides)
        # NeMo-RL pickles the weights, but other jobs and tools read safetensors.
        state = import_module("torch").load(to / _BIN, map_location="cpu", mmap=True, weights_only=True)
        import_module("huggingface_hub").save_torch_state_dict(state, to)
        (to / _BIN).unlink()
    trusted = may_run_code(tokenizer, config)
    saved_tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trusted)
    if template is not None:
        saved_tokenizer.chat_template = Template.load(template).source
    saved_tokenizer.save_pretrained(to)
    if not (to / "config.json").is_file() or not any(to.glob("*.safetensors")):
        raise ValueError("NeMo-RL's converter did not write config.json or *.safetensors files")
    # Files of the policy's folder that the conversion does not write: generation config and model code.
    base = Path(str(policy["model_name"])).expanduser()
    for file in (base / "generation_config.json", *base.glob("*.py")):
        if file.is_file() and not (to / file.name).exists():
            shutil.copyfile(file, to / file.name)


def _iteration(saved: Saved) -> Path | None:
    """Return the folder of Megatron's newest iteration in a checkpoint; None for a DTensor checkpoint."""
    return max(saved.weights.glob("iter_*"), default=None)


def _record(step: int, master: Mapping[str, Any], section: Section) -> dict[str, Any]:
    return {"step": step, "plan": {key: master[section].get(key) for key in ("max_num_steps", "max_num_epochs")}}


def _read_record(run_dir: Path) -> Any:
    path = run_dir / FINISHED
    return json.loads(path.read_text()) if path.is_file() else None
