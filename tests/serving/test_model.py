"""Models that are served: exports of Megatron's checkpoints, and what is refused before a server starts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.beside import EXTRAS
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose, read
from nemo_ext.job.config import compose
from nemo_ext.serving.model import checked_settings, checkpoint_digest, folder_of

EXPORT = """
import sys
from pathlib import Path
from nemo_ext.serving.model import folder_of
print(folder_of(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
"""


@pytest.fixture(scope="module")
def of_megatron(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "mine"
    settings = hf.Settings(to_format="megatron")
    return hf.convert(hf.plan(served_folder, place, settings), settings)


@pytest.fixture
def settings_of() -> Callable[..., Any]:
    """Settings of the composed config of a serve job."""
    return lambda *words: checked_settings(compose("serve", words))


@pytest.mark.slow
def test_replicas_that_come_at_once_export_a_run_once(served_folder: Path, of_megatron: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [sys.executable, "-c", EXPORT, str(of_megatron), str(tmp_path), str(served_folder)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate() for each in both]

    assert [each.returncode for each in both] == [0, 0], said
    assert len({folder for folder, _ in said}) == 1
    assert sum("exporting " in errors for _, errors in said) == 1
    folder = Path(said[0][0].strip())
    exported, original = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (folder, served_folder))
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert folder_of(str(of_megatron), tmp_path, str(served_folder)) == folder


def test_the_name_is_the_folders(settings_of: Callable[..., Any], served_folder: Path) -> None:
    assert settings_of(f"served={served_folder}/")[0].name == "tiny"
    assert settings_of(f"served={served_folder}", "serving.name=other")[0].name == "other"


def test_a_run_is_exported_with_its_depth_for_drafts_alone(
    settings_of: Callable[..., Any], served_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, config = choose(from_config(compose("describe", ["model=nemotron3_super_tiny"])))
    shapes = {n: s for each in found.entries(read(config)[1]) for n, s in zip(each.names, each.shapes, strict=True)}
    source = shutil.copytree(served_folder, tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, source / "model.safetensors")
    run = hf.convert(hf.plan(source, tmp_path / "run", hf.Settings()), hf.Settings(), progress=False)

    exports = {draft: folder_of(str(run), tmp_path / "serve", str(source), draft=draft) for draft in (None, "mtp")}

    assert capsys.readouterr().err.count("is not used; with vLLM, serving.draft=mtp drafts tokens with it\n") == 1
    with safe_open(exports["mtp"] / "model.safetensors", "pt") as kept:
        assert set(kept.keys()) == set(shapes)
    with safe_open(exports[None] / "model.safetensors", "pt") as dropped:
        assert set(dropped.keys()) == {name for name in shapes if not name.startswith("mtp.")}
    words = ("serving.engine=vllm", "serving.draft=mtp", f"files_from={source}")
    for model in (run, exports["mtp"]):
        assert settings_of(f"served={model}", *words)[0].draft == "mtp"
    with pytest.raises(ValueError, match="has no multi-token prediction"):
        settings_of(f"served={exports[None]}", *words)


def test_drafts_with_a_run_before_its_first_checkpoint(
    settings_of: Callable[..., Any], served_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    words = ("serving.engine=vllm", "serving.draft=mtp", f"files_from={served_folder}")

    assert settings_of(f"served={tmp_path / 'run'}", *words)[0].draft == "mtp"

    for draft in ("mtp", None):
        with pytest.raises(ValueError, match="neither a Hugging Face checkpoint"):
            folder_of(str(tmp_path / "run"), tmp_path, str(served_folder), draft=draft)


def test_prediction_without_drafts_is_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))

    for draft, remarks in ((None, 1), ("mtp", 0)):
        assert folder_of(str(tmp_path), tmp_path / "serve", None, draft=draft) == tmp_path
        said = capsys.readouterr().err
        assert said.count("its multi-token prediction is not used\n") == remarks, "and no advice that would be refused"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("port=70000",), "port=70000: expected a number from 0"),
        (("serving.replicas=2", "serving.least=3"), "least=3 exceeds replicas=2"),
        (("serving.open=true", "serving.host=0.0.0.0"), "so a key is required"),
        (("serving.engine=vlm",), "serving.engine=.vlm."),
        (("serving.nodes=2",), "requires engine=vllm"),
        (("serving.draft=mtp",), "draft=mtp requires engine=vllm"),
        (("serving.draft=mtp", "serving.engine=vllm"), "model=.*tiny has no multi-token prediction"),
        (("serving.max_batch=0",), "serving.max_batch=0"),
        (("serving.replica=-1",), "serving.replica=-1"),
    ],
)
def test_settings_that_cannot_be(
    settings_of: Callable[..., Any], served_folder: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(f"served={served_folder}", *words)


def test_models_that_cannot_be(settings_of: Callable[..., Any], of_megatron: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(of_megatron, tmp_path / "bare", ignore=shutil.ignore_patterns(EXTRAS))
    with pytest.raises(ValueError, match="is a Megatron checkpoint without a tokenizer; set files_from"):
        settings_of(f"served={bare}")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
    with pytest.raises(ValueError, match="has no tokenizer; add one with `nemo-ext convert files_from=FOLDER`"):
        settings_of(f"served={tmp_path}", "serving.engine=vllm")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is quantised by ModelOpt, which transformers does not read"):
        settings_of(f"served={tmp_path}")
    settings_of(f"served={tmp_path}", "serving.engine=vllm")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Mine"}}))
    (tmp_path / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match="review it, then set trust_remote_code=true"):
        settings_of(f"served={tmp_path}")
    with pytest.raises(ValueError, match="no such directory"):
        folder_of(str(tmp_path / "nothing"), tmp_path, None)


def test_a_run_is_served_with_the_tokenizer_of_its_data(
    settings_of: Callable[..., Any], of_megatron: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match="has no multi-token prediction"):
        settings_of(f"served={of_megatron}", "serving.engine=vllm", "serving.draft=mtp")
    settings_of(f"served={of_megatron}")  # what its checkpoint was converted with lies beside it
    run = shutil.copytree(of_megatron, tmp_path / "run", ignore=shutil.ignore_patterns(EXTRAS))
    (model,) = (run / "model").glob("*.yaml")
    (run / "config.yaml").write_text(model.read_text() + "\ndata: {tokenizer: {kind: byte}}\n")
    settings_of(f"served={run}")
    tokenizer = AutoTokenizer.from_pretrained(folder_of(str(run), tmp_path / "served", None))
    folder_of(str(run), tmp_path / "served", None)  # as after an interrupt: the export that is there is taken

    assert tokenizer.encode("né", add_special_tokens=False) == list("né".encode())
    assert tokenizer.eos_token_id == 256


def test_another_checkpoint_has_another_digest(served_folder: Path, tmp_path: Path) -> None:
    before = checkpoint_digest(served_folder)

    assert checkpoint_digest(served_folder) == before
    (tmp_path / "config.json").write_text((served_folder / "config.json").read_text())
    assert checkpoint_digest(tmp_path) != before
