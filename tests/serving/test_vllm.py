"""Command lines of vLLM: what a model, its template and its precision ask for; and that this vLLM takes them."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import FORMATS, choose
from nemo_ext.job.config import compose
from nemo_ext.serving import vllm
from nemo_ext.serving.settings import ServingSettings
from nemo_ext.serving.vllm import check_drafts, command

QWEN3 = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>{# <think> #}"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes what decides of a Hugging Face folder."""

    def write(
        template: str = "", config: dict[str, Any] | None = None, quantised: dict[str, Any] | None = None
    ) -> Path:
        place = tmp_path / "mine"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | (config or {})))
        (place / "tokenizer_config.json").write_text("{}")
        if template:
            (place / "chat_template.jinja").write_text(template)
        if quantised is not None:
            (place / "hf_quant_config.json").write_text(json.dumps({"quantization": quantised}))
        return place

    return write


def words(folder: Path, config: dict[str, Any] | None = None, rank: int = 0, **given: Any) -> str:
    settings = ServingSettings(engine="vllm", name="mine", **given)
    return " ".join(command(folder, settings, config or {}, port=8001, rank=rank)).replace(str(folder), "FOLDER")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", ""),
        ("nemotron3_nano", "--enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser nemotron_v3"),
        ("olmo3", "--enable-auto-tool-choice --tool-call-parser olmo3 --reasoning-parser olmo3"),
        ("domyn", "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"),
        ("llama_nemotron", "--reasoning-parser qwen3"),
        (QWEN3, "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"),
    ],
)
def test_parsers_by_the_chat_template(folder: Callable[..., Path], template: str, said: str) -> None:
    text = template if not template or "{" in template else Template.load(template).source

    given = words(folder(text)).removeprefix("vllm serve FOLDER --host 127.0.0.1 --port 8001 --served-model-name mine")

    assert sorted(given.split()) == sorted(said.split())


def test_all_settings(folder: Callable[..., Path]) -> None:
    given = words(
        folder(quantised={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
        gpus=2,
        dtype="bfloat16",
        max_length=4096,
        host="n1",
        vllm={"gpu_memory_utilization": 0.85, "enable_prefix_caching": False, "async_scheduling": True},
    )

    assert given == (
        "vllm serve FOLDER --host n1 --port 8001 --served-model-name mine --dtype bfloat16 --max-model-len 4096 "
        "--tensor-parallel-size 2 --kv-cache-dtype fp8 --gpu-memory-utilization 0.85 --async-scheduling "
        "--no-enable-prefix-caching"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_several_nodes(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "20041")

    given = words(folder(), rank=rank, gpus=4, nodes=2)

    assert given == (
        "vllm serve FOLDER --host 127.0.0.1 --port 8001 --served-model-name mine --tensor-parallel-size 4 "
        f"--pipeline-parallel-size 2 --nnodes 2 --node-rank {rank} --master-addr 10.0.0.1 --master-port 10041"
        + " --headless"
        * rank
    )


def test_several_nodes_without_slurm(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)

    with pytest.raises(ValueError, match="nemo-ext submit job=serve"):
        words(folder(), nodes=2)


@pytest.mark.parametrize("key", ["api_key", "port", "tensor_parallel_size"])
def test_what_other_keys_say(folder: Callable[..., Path], key: str) -> None:
    with pytest.raises(ValueError, match=f"vllm must not contain {key}; set "):
        words(folder(), vllm={key: 1})


def test_code_of_others_needs_consent(folder: Callable[..., Path]) -> None:
    place = folder(config={"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})
    (place / "modeling.py").write_text("raise SystemExit")

    with pytest.raises(ValueError, match="review it, then set trust_remote_code=true"):
        words(place)
    assert "--trust-remote-code" in words(place, {"trust_remote_code": True})


def of_super(*words: str) -> dict[str, Any]:
    """The config.json of Nemotron 3 Super's toy model, which predicts several tokens."""
    return choose(from_config(compose("describe", ["model=nemotron3_super_tiny", *words])))[1]


def test_drafts(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder(config=of_super())
    monkeypatch.setattr(vllm, "_keeps_rejected", lambda: False)
    drafts = '--speculative-config {"method": "mtp", "num_speculative_tokens": '

    assert words(place, draft="mtp").endswith(drafts + "1}")
    assert words(place, draft="mtp", draft_tokens=3).endswith(drafts + "3}")
    (place / "config.json").write_text(json.dumps(of_super() | {"quantization_config": {"quant_method": "modelopt"}}))
    assert words(place, draft="mtp").endswith(drafts + "1}")
    monkeypatch.setattr(vllm, "module_folder", lambda name: "somewhere" if name == "vllm" else "")
    with pytest.raises(ValueError, match="has no model nemotron_h_mtp; install a newer vLLM"):
        words(place, draft="mtp")


@pytest.mark.parametrize(
    ("version", "code"), [("0.32.0+cpu", ""), ("0.32.0", ""), ("0.40.0+cpu", "num_accepted_tokens")]
)
def test_vllm_for_cpus(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, code: str
) -> None:
    (tmp_path / "causal_conv1d.py").write_text(code)
    monkeypatch.setattr(vllm.metadata, "version", lambda _: version)
    monkeypatch.setattr(vllm, "module_folder", lambda _: str(tmp_path))
    place = folder(config=of_super())

    if version == "0.32.0+cpu":
        with pytest.raises(ValueError, match="vLLM for CPUs returns wrong tokens"):
            words(place, draft="mtp")
    else:
        assert "--speculative-config" in words(place, draft="mtp")


OWN_DEPTHS = "megatron.mtp_use_repeated_layer=false"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.pattern=ME*-"], "has no multi-token prediction; set serving.draft=null"),
        ([OWN_DEPTHS], "has 2 prediction depths with their own weights"),
        (["model.pattern=ME*-/M*-"], "has blocks - M in its prediction depth, and vLLM drafts only with"),
    ],
)
def test_models_without_drafts(folder: Callable[..., Path], changes: list[str], message: str) -> None:
    if "pattern" in changes[0]:
        changes = [*changes, OWN_DEPTHS]

    with pytest.raises(ValueError, match=message):
        words(folder(config=of_super(*changes)), draft="mtp")


@pytest.mark.parametrize("index", [False, True])
def test_weights_without_prediction_have_no_drafts(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    monkeypatch.setattr(vllm, "_keeps_rejected", lambda: False)
    place = folder(config=of_super())

    def write(*names: str) -> None:
        save_file({name: torch.ones(1) for name in names}, place / "model.safetensors")
        if index:
            listed = {"weight_map": dict.fromkeys(names, "model.safetensors")}
            (place / "model.safetensors.index.json").write_text(json.dumps(listed))

    write("lm_head.weight")
    with pytest.raises(ValueError, match=r"model=.*mine has multi-token .* weights have no tensors mtp\.\*; set"):
        words(place, draft="mtp")
    write("lm_head.weight", "mtp.layers.0.norm.weight")
    assert "--speculative-config" in words(place, draft="mtp")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not a supported checkpoint architecture"),
        ("model.pattern=MEM{state=8}*EME-/*E", "NemotronHPuzzleForCausalLM does not support Mamba-2 blocks with"),
    ],
)
def test_models_that_no_format_expresses_have_no_drafts(model: dict[str, Any] | str, why: str) -> None:
    if isinstance(model, str):
        model = compose("train", ["model=nemotron3_super_tiny", "data=mock", "run_dir=unused", model])

    with pytest.raises(ValueError, match=rf"^serving.draft=mtp: model=mine: .*{why}.*; set serving.draft=null$") as got:
        check_drafts(model, "mine")
    assert "mtp=drop" not in str(got.value)


def test_our_own_format_has_no_drafts(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    described = from_config(compose("describe", ["model=nemotron3_super_tiny"]))
    monkeypatch.setattr(vllm.formats, "read", lambda _: (FORMATS["NemoExtBlocksForCausalLM"], described))

    with pytest.raises(ValueError, match=r"model=.*mine is in the format NemoExtBlocksForCausalLM"):
        words(folder(), draft="mtp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_tokens": 2}, "draft_tokens=2 requires draft=mtp"),
        (
            {"draft": "mtp", "vllm": {"speculative_config": {"method": "ngram"}}},
            "speculative_config cannot be combined",
        ),
        ({"draft": "ngram"}, "draft"),
        ({"draft": "mtp", "draft_tokens": 0}, "draft_tokens"),
    ],
)
def test_settings_of_drafts(folder: Callable[..., Path], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        words(folder(config=of_super()), **given)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_knows_the_words_and_the_parsers(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "20041")
    monkeypatch.setattr(vllm, "_keeps_rejected", lambda: False)
    parser = make_arg_parser(FlexibleArgumentParser())
    place = folder()
    for template in ("nemotron3_nano", "olmo3", "domyn"):
        (place / "chat_template.jinja").write_text(Template.load(template).source)
        settings = ServingSettings(
            engine="vllm", name="mine", nodes=2, gpus=4, max_length=4096, dtype="bfloat16", draft="mtp"
        )
        (place / "config.json").write_text(json.dumps(of_super()))
        told = parser.parse_args(command(place, settings, {}, port=8001, rank=1)[2:])
        assert told.tool_call_parser in ToolParserManager.list_registered()
        assert told.reasoning_parser in ReasoningParserManager.list_registered()
        assert told.speculative_config == {"method": "mtp", "num_speculative_tokens": 1}
        assert (told.nnodes, told.node_rank, told.headless) == (2, 1, True)
