"""The command `nemo-ext rl engine=nemo_rl` with NeMo-RL's own loops and checkpoints: stopped, resumed, finished."""

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.chat.sample import Sample
from nemo_ext.chat.template import Template
from nemo_ext.job.config import INTERRUPTED, compose
from nemo_ext.rl.job import checked_algorithm
from nemo_ext.rl.job import run as run_job
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.compat import setting
from nemo_ext.rl.nemo_rl.draft import Draft
from nemo_ext.rl.nemo_rl.job import LORA, MEGATRON_TARGETS, _save_format, put_lora, settings_of
from nemo_ext.rl.nemo_rl.rehearsal import rehearse
from nemo_ext.rl.settings import Lora
from nemo_ext.rl.tasks import arithmetic

GRPO = (
    *("preset=domyn_math_grpo", "rl.prompts_per_step=2", "rl.generations_per_prompt=2", "rl.batch=4"),
    *("rl.lengths={prompt: 15000, response: 4000}", "environments={math: {reward: outcome}}"),
)
ASYNC = ("rl.asynchronous={max_age: 1, in_flight: false}", "nemo_rl.set.cluster.gpus_per_node=2")
DPO = ("preset=dpo_delta", "rl.batch=2", "rl.lengths={total: 2000}")
COMMON = (
    *(
        "engine=nemo_rl",
        "nemo_rl.backend=dtensor",
        "template=nemotron3_nano",
        "on_inexpressible=warn",
        "save_every=100",
    ),
    *("rl.validation.every=null", "rl.schedule.kind=constant"),
    "nemo_rl.set.checkpointing.checkpoint_must_save_by='00:00:00:00'",
)


class Worker:
    """Worker that saves a Llama in the format of DTensor's workers, with other weights every time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.saves = 0

    def __call__(self, weights: Path, checkpointing: Any) -> None:
        self.saves += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        if checkpointing.get("model_save_format") is None:
            importlib.import_module("nemo_rl.utils.native_checkpoint").save_checkpoint(self.model, str(weights))
        elif checkpointing.get("save_consolidated"):
            self.model.save_pretrained(weights / "model" / "consolidated")
        else:
            dcp = importlib.import_module("torch.distributed.checkpoint")
            dcp.save(self.model.state_dict(), checkpoint_id=str(weights / "model"))

    def left(self, folder: Path) -> bool:
        """True if a folder has the last saved weights."""
        from transformers import AutoModelForCausalLM

        found, wanted = AutoModelForCausalLM.from_pretrained(folder).state_dict(), self.model.state_dict()
        return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.nemo_rl
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_setup_accepts_adapters(backend: str, tiny_llama: Path, nemo_rl: Any, tmp_path: Path) -> None:
    words = (*GRPO, *COMMON, f"nemo_rl.backend={backend}", f"model={tiny_llama}", f"run_dir={tmp_path}")
    config = compose("rl", (*words, "tasks.train.path=t", "lora={rank: 4}", "rl.schedule.steps=2"))
    root = Path(nemo_rl.__file__).parents[2]

    _, master = settings_of(config, checked_algorithm(config), Checkout(root))

    rehearse(master, "grpo")
    section = setting(master, *LORA[backend].split("."))
    assert section["enabled"] and section["dim"] == 4 and section["alpha"] == 8
    assert section["target_modules"] == ([] if backend == "dtensor" else list(MEGATRON_TARGETS))
    with pytest.raises(ValueError, match="out_proj cannot have adapters"):
        put_lora(Draft(Checkout(root), checked_algorithm(config)), Lora(targets=("out_proj",)), "dtensor")


@pytest.mark.nemo_rl
@pytest.mark.parametrize("kind", ["sync", "async", "dpo"])
def test_stopped_resumed_and_finished(
    kind: str,
    grpo_stage: Callable[..., Any],
    dpo_stage: Any,
    jsonl: Callable[..., Path],
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind == "dpo":
        stage, words = dpo_stage, (*DPO, f"pairs.train={jsonl('pairs.jsonl', PAIRS)}")
    else:
        tasks = list(arithmetic.tasks(4, seed=1, level=1))
        render = Template.load("nemotron3_nano").render
        prompts = (
            render(Sample(id=task.id, messages=task.prompt), thinking=True, add_generation_prompt=True)
            for task in tasks
        )
        script = {
            prompt.text: [[f"so</think>{arithmetic.solution(task)}"], ["so</think>no"]]
            for task, prompt in zip(tasks, prompts, strict=True)
        }
        stage = grpo_stage(script, is_async=kind == "async")
        path = jsonl("tasks.jsonl", [task.record() for task in tasks])
        words = (*GRPO, *(ASYNC if kind == "async" else ()), f"tasks.train.path={path}")
    from transformers import AutoModelForCausalLM

    worker = stage.policy.save = Worker(AutoModelForCausalLM.from_pretrained(tiny_llama))
    run = tmp_path / "run"

    def start(steps: int) -> str:
        capsys.readouterr()
        given = [*COMMON, *words, f"model={tiny_llama}", f"run_dir={run}", f"rl.schedule.steps={steps}"]
        run_job(compose("rl", given))
        return capsys.readouterr().err

    # NeMo-RL stops after the first step, because its time limit is over.
    with pytest.raises(SystemExit) as stopped:
        start(2)
    assert stopped.value.code == INTERRUPTED
    said = "stopped at step 1 of 2 by checkpoint_must_save_by; the same command resumes"
    assert said in capsys.readouterr().err
    assert not (run / "model").exists() and worker.saves == 1

    # It is over again after the second, which is the last.
    assert "model of step 2" in start(2)
    assert worker.left(run / "model") and worker.saves == 2
    assert "this run is finished" in start(2) and worker.saves == 2

    # Killed while it was exported: no more training.
    shutil.rmtree(run / "model")
    (run / ".model").mkdir()
    assert "model of step 2" in start(2)
    assert worker.left(run / "model") and worker.saves == 2 and not (run / ".model").exists()

    # More steps.
    trained = len(stage.policy.losses)
    assert "model of step 3" in start(3)
    assert worker.left(run / "model") and worker.saves == 3 and len(stage.policy.losses) == trained + 1


PAIRS = [
    {
        "context": [{"role": "user", "content": f"question {n}"}],
        "completions": [
            {"rank": 1, "completion": [{"role": "assistant", "content": "bad"}]},
            {"rank": 0, "completion": [{"role": "assistant", "content": "good"}]},
        ],
    }
    for n in range(6)
]


@pytest.mark.parametrize(
    ("dtensor", "converts", "checkpointing"),
    [
        ({"enabled": False, "_v2": True}, True, None),
        ({"enabled": True}, True, {"model_save_format": None}),
        ({"enabled": True, "_v2": False}, False, {"model_save_format": None}),
        ({"enabled": True, "_v2": True}, True, {"model_save_format": "torch_save"}),
        ({"enabled": True, "_v2": True}, False, {"model_save_format": "safetensors", "save_consolidated": True}),
    ],
)
def test_workers_save_in_a_convertible_format(
    dtensor: dict[str, Any], converts: bool, checkpointing: dict[str, Any] | None, tmp_path: Path
) -> None:
    for path, text in {
        "nemo_rl/algorithms/grpo.py": "",
        "examples/configs/grpo_math_1B.yaml": "",
        "nemo_rl/utils/native_checkpoint.py": (
            "def load(path):\n    return path + '.metadata'\n\n"
            f"def convert_dcp_to_hf(path):\n    return path + {'.metadata' if converts else '.other'!r}\n"
        ),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    found = _save_format({"dtensor_cfg": dtensor}, Checkout(tmp_path))

    assert found == ({} if checkpointing is None else {"checkpointing": checkpointing})


@pytest.mark.skipif(not os.environ.get("NEMO_RL_ROOT"), reason="NEMO_RL_ROOT is not set: a NeMo-RL checkout")
def test_formats_that_each_version_converts() -> None:
    checkout = Checkout(os.environ["NEMO_RL_ROOT"])
    text = (checkout.root / "nemo_rl/utils/native_checkpoint.py").read_text()
    assert checkout.converts_dtensor_v2 == ("Dtensor V2" in text)
