"""Python files in a model's folder that may run, and those that need the user's consent."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.checkpoint.foreign_code import foreign_code, may_run_code
from nemo_ext.job.config import compose
from nemo_ext.rl.job import run
from nemo_ext.rl.nemo_rl.export import leave_model

OURS = "modeling_decilm.py"
MAPPED = {"auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig", "AutoModel": "modeling_decilm.DeciLMModel"}}


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Modules that take seconds to import, imported when a test runs rather than during collection."""
    global transformers
    import transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with our modelling files."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(MAPPED))
    for name in ("configuration_decilm.py", OURS):
        shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / name), made / name)
    return made


def test_our_own_files_need_no_consent(folder: Path) -> None:
    assert may_run_code(str(folder), {}) is True


def test_a_folder_without_code_contains_no_foreign_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.py").write_text("")

    assert may_run_code(str(tmp_path), {}) is False


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (OURS, "\nimport os\n"),  # one of our files with a foreign line
        ("helper.py", "import os\n"),  # a file that ours could be made to import
        ("package/helper.py", "import os\n"),
    ],
)
def test_other_files_need_consent(file: str, text: str, folder: Path) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("a") as opened:
        opened.write(text)

    today = r" \(if an earlier nemo_ext exported it, replace it .* modeling_decilm.py " if file == OURS else "$"
    with pytest.raises(
        ValueError, match=rf"would run code of this folder .*{file}.* set trust_remote_code=true{today}"
    ):
        may_run_code(str(folder), {"trust_remote_code": False})

    assert may_run_code(str(folder), {"trust_remote_code": True}) is True


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"auto_map": ["somebody/model--code.Class", None]}),
        ("video_preprocessor_config.json", {"auto_map": {"AutoProcessor": "somebody/model--code.Class"}}),
        ("config.4.0.0.json", {"auto_map": {"AutoConfig": "code.Class"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "linked/code.Class"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "/elsewhere/code.Class"}}),
        ("config.json", {**MAPPED, "configuration_files": ["config.4.0.0.json"]}),
        ("adapter_config.json", {"base_model_name_or_path": "somebody/model"}),
    ],
)
def test_consent_cannot_be_bypassed(file: str, content: dict[str, Any], folder: Path) -> None:
    (folder / file).write_text(json.dumps(content))

    with pytest.raises(ValueError, match="trust_remote_code=true"):
        may_run_code(str(folder), {})


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("named", ["somebody/model--code.Class", [None, "somebody/model--code.Class"]])
def test_code_of_other_repositories_needs_consent(config: str, named: Any, folder: Path) -> None:
    (folder / config).write_text(json.dumps({"auto_map": {"AutoTokenizer": named}}))

    assert foreign_code(folder) == ["somebody/model--code.Class"]


def test_downloaded_code_needs_consent() -> None:
    with pytest.raises(ValueError, match="somebody/model is not a folder on this machine"):
        may_run_code("somebody/model", {})


@pytest.mark.parametrize("engine", ["trl", "nemo_rl"])
def test_training_checks_consent_before_it_starts(engine: str, folder: Path, tmp_path: Path) -> None:
    (folder / "helper.py").write_text("")
    words = ["preset=rl_zero", f"engine={engine}", f"model={folder}", f"run_dir={tmp_path / 'run'}"]

    with pytest.raises(ValueError, match=r"\(helper\.py\): .* trust_remote_code=true"):
        run(compose("rl", [*words, "tasks.train.path=tasks.jsonl", "rl.schedule.steps=1"]))

    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_code_needs_consent_after_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL's checkpoint has a tokenizer with code, which transformers would import."""
    ran = tmp_path / "ran"
    weights = tmp_path / "checkpoints" / "step_3" / "policy" / "weights"
    (weights / "consolidated").mkdir(parents=True)
    (weights.parents[1] / "training_info.json").write_text("{}")
    (weights / "consolidated" / "model.safetensors").write_bytes(b"")
    (weights / "consolidated" / "config.json").write_text("{}")
    tokenizer = weights.parent / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizer as Own\n"
    (tokenizer / "own.py").write_text(code)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    master = {
        "checkpointing": {"checkpoint_dir": str(tmp_path / "checkpoints")},
        "policy": {"model_name": "model", "tokenizer": {"name": "model"}},
        "dpo": {"max_num_steps": 3},
    }
    leave_model(tmp_path, 3, master, "dpo", tmp_path)

    assert "would run code of this folder that is not part of nemo_ext (own.py" in capsys.readouterr().err
    assert not ran.exists() and not (tmp_path / "model").exists()
