"""Our models in Megatron-Bridge. Names, sizes and layer specs are checked on models built here, without it; `make
bridge` runs the tests that need Megatron-Bridge itself, in a separate process."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import make_dataclass
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import nemo_ext
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.pipeline import parameter_counts
from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.formats import FORMATS, Format, choose, read
from nemo_ext.job.config import compose

SIGMOID = ("megatron.moe_router_score_function=sigmoid", "megatron.moe_router_enable_expert_bias=true")
MODELS = {
    "NemotronForCausalLM": ("model=domyn_small_tiny",),
    "NemotronForCausalLM with biases": (
        "model=domyn_small_tiny",
        "megatron.disable_bias_linear=false",
        "megatron.untie_embeddings_and_output_weights=false",
        "megatron.kv_channels=40",
    ),
    "NemotronHForCausalLM": ("model=nemotron3_nano_tiny", *SIGMOID),
    "NemotronHPuzzleForCausalLM": (
        "model=nemotron3_nano_tiny",
        "model.pattern=ME{ffn=96,topk=1}*{kv=1}-{ffn=96}EM*E",
        *SIGMOID,
    ),
    "NemotronHForCausalLM with MTP": (
        "model=nemotron3_super_tiny",
        "model.pattern=MEM*E/M*E/M*E",
        "megatron.mtp_use_repeated_layer=false",
        "megatron.norm_epsilon=1e-5",
    ),
    "LlamaForCausalLM": ("model=llama_nemotron_tiny", "model.pattern=(*-)x2"),
    "DeciLMForCausalLM": (
        "model=llama_nemotron_tiny",
        "model.pattern=*{kv=1}-*{linear}-{ffn=96}-{linear}--*{window=8}",
    ),
    "OlmoForCausalLM": ("model=olmo1_tiny",),
    "Olmo3ForCausalLM": ("model=olmo3_tiny",),
    "NemoExtBlocksForCausalLM": (
        "model=nemotron3_nano_tiny",
        "model.pattern=M{heads=4}M{linear}*{kv=1}-{ffn=96}E{ffn=64}E{linear}*{linear}M*-{linear}E{latent=48}E{latent=32}",
        *SIGMOID,
    ),
    "NemoExtBlocksForCausalLM from YaRN": (
        "model=domyn_small_tiny",
        "model.pattern=*{window=8}-*--",
        "megatron.position_embedding_type=yarn",
        "megatron.rotary_scaling_factor=8",
        "megatron.yarn_original_max_position_embeddings=64",
        "+model.yarn_on_windowed=false",
    ),
}


def needs_bridge(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs Megatron-Bridge."""
    return pytest.mark.bridge(pytest.mark.usefixtures("megatron_bridge")(test))


every_model = pytest.mark.parametrize("name", MODELS)
Sections = dict[str, dict[str, Any]]
BuildSections = Callable[[Mapping[str, Any]], torch.nn.Module]


@pytest.fixture(autouse=True, scope="module")
def imported(megatron: None) -> None:
    """Modules that import Megatron, which takes seconds: imported when tests run, not during collection."""
    global bridge
    from nemo_ext.megatron import bridge


@pytest.fixture(scope="module")
def megatron_bridge(imported: None) -> None:
    """Fails if Megatron-Bridge cannot be imported: `make bridge` must not pass without it."""
    assert bridge.MISSING is None, bridge.MISSING


def described(name: str) -> tuple[Format, Description]:
    """The model with that name, in its format."""
    found, description = read(hf_config(name))
    assert found.architecture == name.split()[0]
    return found, description


def hf_config(name: str) -> dict[str, Any]:
    """Its config.json."""
    return choose(from_config(compose("train", ["run_dir=unused", "data=mock", *MODELS[name]])))[1]


def live(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a model, by name."""
    saved = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@every_model
def test_every_parameter_of_a_model_is_named_once(build_sections: BuildSections, name: str) -> None:
    found, description = described(name)
    model = build_sections(to_config(description))

    names = [weight.names[0] for weight in bridge.weights(found, description)]

    assert sorted(names) == sorted(live(model))


@every_model
def test_parameters_are_shared_as_megatron_shares_them(build_sections: BuildSections, name: str) -> None:
    found, description = described(name)
    tensors = live(build_sections(to_config(description)))
    # RowParallelLinear's bias is whole on every rank, as Megatron-Bridge's RowParallelMapping knows.
    dimension = {"row": 1, "replicated": None}

    for weight in bridge.weights(found, description):
        tensor = tensors[weight.names[0]]
        partitioned = getattr(tensor, "tensor_model_parallel", False)
        if weight.kind == "experts":
            expected: int | None = 0 if "linear_fc1" in weight.names[0] else 1
        elif weight.kind == "row" and tensor.dim() == 1:
            expected = None
        else:
            expected = dimension.get(weight.kind, 0)
        actual = (tensor.partition_dim if tensor.partition_dim >= 0 else 0) if partitioned else None
        assert actual == expected, weight


def test_the_names_of_transformer_engine_are_those_of_the_checkpoint() -> None:
    found, description = described("NemotronHForCausalLM")

    for entry, weight in zip(found.entries(description), bridge.weights(found, description), strict=True):
        if "layer_norm" in entry.pieces[0].key:
            assert weight.names[1:] == (entry.pieces[0].key,)
        elif ".experts.experts." in entry.pieces[0].key:
            expert = entry.pieces[0].offset[0]
            linear = "linear_fc1" if "linear_fc1" in entry.pieces[0].key else "linear_fc2"
            assert weight.names[0].endswith(f"mlp.experts.local_experts.{expert}.{linear}.weight")
            assert weight.names[1].endswith(f"mlp.experts.{linear}.weight{expert}")
        else:
            assert len(weight.names) == 1


def parsed(sections: Sections) -> Any:
    """The model config that Megatron's own parser makes of a config."""
    from nemo_ext.megatron.arguments import command_line, parse_arguments, pattern_with_cuts
    from nemo_ext.megatron.model import model_config

    plain = compose("train", ["run_dir=unused", "data=mock", "precision=fp32"])
    tiny = compose("describe", ["model=nemotron3_nano_tiny", "precision=fp32"])
    others = {key: value for key, value in plain["megatron"].items() if key not in tiny["megatron"]}
    others |= {"moe_token_dispatcher_type": "allgather", "seq_length": 64}
    config = {**plain, "model": sections["model"], "megatron": {**others, **sections["megatron"]}}
    return model_config(config["model"], pattern_with_cuts(config), parse_arguments(command_line(config), world_size=1))


@every_model
def test_a_provider_has_the_fields_that_megatron_derives_from_the_flags(megatron: None, name: str) -> None:
    _, description = described(name)
    expected = parsed(to_config(description))

    fields = bridge.provider_fields(description)

    assert {field: getattr(expected, field) for field in fields} == fields


@every_model
def test_a_provider_has_the_layer_spec_of_the_trainer(megatron: None, name: str) -> None:
    _, description = described(name)
    sections = to_config(description)
    defaults = {"window_size": None, "window_attn_skip_freq": None, "rotary_base": 10000, "rotary_percent": 1.0}
    defaults |= {"seq_len_interpolation_factor": None}
    provider = SimpleNamespace(sections=sections, **(defaults | bridge.provider_fields(description)))

    spec, expected = bridge.stack_spec(provider), parsed(sections).stack_spec()

    assert spec.module is expected.module and spec.params == expected.params


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches modelling files that tests load in a folder of the tests, not in the user's home."""
    import transformers.dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "hf_modules")
        )
        yield


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes config.json and its code."""
    (folder / "config.json").write_text(json.dumps(config))
    for code in read(config)[0].code:
        shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / code), folder / code)


@every_model
def test_the_config_object_of_transformers_is_read_as_its_file(modules_cache: None, tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    found, description = described(name)
    write_config(tmp_path, hf_config(name))

    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)

    assert bridge.read_hf_config(config) == (found, description)


def as_object(values: Mapping[str, Any]) -> Any:
    return make_dataclass("Values", values)(**values)


def test_published_decilm_configs_keep_their_blocks_as_objects() -> None:
    found, description = described("DeciLMForCausalLM")
    values = hf_config("DeciLMForCausalLM")
    values["block_configs"] = [
        as_object({part: as_object(keys) for part, keys in layer.items()}) for layer in values["block_configs"]
    ]

    assert bridge.read_hf_config(SimpleNamespace(to_dict=lambda: values)) == (found, description)


def test_without_megatron_bridge_nothing_is_registered_and_the_reason_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "MISSING", "megatron-bridge cannot be imported here: No module named 'x'")

    reason = "no bridge was registered, as megatron-bridge cannot be imported here: No module named 'x'; "
    reason += "see `nemo-ext doctor megatron-bridge`"
    assert nemo_ext.register() == nemo_ext.Registration((), {"megatron-bridge": reason})
    with pytest.raises(ImportError, match=r"bridge=True requires Megatron-Bridge, .*: pip install megatron-bridge"):
        nemo_ext.register(bridge=True)


def test_registration_can_be_disabled() -> None:
    registration = nemo_ext.register(bridge=False)

    assert registration.registered == () and "bridge=False" in registration.skipped["megatron-bridge"]


def test_a_puzzle_childs_pipeline_is_divided_by_weights() -> None:
    sections = compose("describe", ["model=llama_nemotron_ultra_253b"])
    plain = bridge.provider_fields(from_config(sections))["hybrid_layer_pattern"]

    cut = bridge.in_stages(plain, sections, 18)

    assert cut.replace("|", "") == plain and len(cut.split("|")) == 18
    architecture = from_config(sections).architecture
    costs = parameter_counts(architecture)
    even = tuple(round(stage * 145 / 18) for stage in range(1, 18))
    assert max(costs.of_stages(parse(cut).cuts)) < max(costs.of_stages(even)) / 2
    assert bridge.in_stages(cut, sections, 18) == cut and bridge.in_stages(plain, sections, 1) == plain


def test_a_class_without_a_format_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"'LamaForCausalLM' is not a supported checkpoint architecture.*did you mean .LlamaForCausalLM",
    ):
        nemo_ext.register(replace=["LamaForCausalLM"])


def test_importing_the_package_imports_no_torch() -> None:
    code = "import nemo_ext, sys; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# From here on Megatron-Bridge is needed.


@pytest.fixture
def registered() -> nemo_ext.Registration:
    return nemo_ext.register(bridge=True, replace=tuple(FORMATS))


@needs_bridge
def test_bridges_of_megatron_bridge_are_replaced_only_by_name() -> None:
    """In a separate process, as a registration cannot be undone."""
    code = """
import nemo_ext
from nemo_ext.megatron.cpu import runtime

runtime.enable()
from nemo_ext.megatron.bridge import BlocksBridge
from megatron.bridge.models.conversion.model_bridge import get_model_bridge
import transformers

first = nemo_ext.register(bridge=True)
assert {"DeciLMForCausalLM", "NemoExtBlocksForCausalLM", "OlmoForCausalLM", "Olmo3ForCausalLM"} <= set(first.registered)
assert "LlamaForCausalLM" in first.skipped and "NemotronHForCausalLM" in first.skipped
assert not isinstance(get_model_bridge(transformers.LlamaForCausalLM), BlocksBridge)
assert isinstance(get_model_bridge("DeciLMForCausalLM"), BlocksBridge)
ours = type(get_model_bridge("DeciLMForCausalLM"))
assert nemo_ext.register() == first and type(get_model_bridge("DeciLMForCausalLM")) is ours
second = nemo_ext.register(replace=["LlamaForCausalLM"])
assert set(second.registered) == {*first.registered, "LlamaForCausalLM"}
assert isinstance(get_model_bridge(transformers.LlamaForCausalLM), BlocksBridge)
assert isinstance(get_model_bridge("LlamaForCausalLM"), BlocksBridge)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr[-2000:]


def write_weights(folder: Path, found: Format, description: Description) -> dict[str, torch.Tensor]:
    """Random weights of a model as a Hugging Face checkpoint."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for entry in found.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def converted(found: Format, description: Description, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The live model's tensors, converted by our own rules."""
    expected: dict[str, torch.Tensor] = {}
    for entry in found.entries(description):
        sources = [tensors[name] for name in entry.names]
        parts = entry.rule.to_megatron(sources, [piece.shape for piece in entry.pieces])
        if ".experts.experts." in entry.pieces[0].key:
            (part,), first = parts, entry.pieces[0].offset[0]
            for number, expert in enumerate(part):
                expected[bridge.parameter_names(entry.pieces[0], first + number)[0]] = expert
        else:
            expected[bridge.parameter_names(entry.pieces[0])[0]] = torch.cat(parts)
    return expected


def provided(auto: Any, **settings: Any) -> torch.nn.Module:
    """The model of a provider on this machine."""
    provider = auto.to_megatron_provider(load_weights=False)
    settings = {
        "transformer_impl": "local",
        "apply_rope_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "use_cpu_initialization": True,
        "attention_backend": "auto",
    } | settings
    if torch.cuda.is_available():
        settings["use_cpu_initialization"] = False
    for key, value in settings.items():
        assert hasattr(provider, key)
        setattr(provider, key, value)
    provider.finalize()
    return provider.provide(pre_process=True, post_process=True)


@needs_bridge
@every_model
def test_autobridge_loads_and_exports_every_tensor(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path, name: str
) -> None:
    from megatron.bridge import AutoBridge

    found, description = described(name)
    write_config(tmp_path, hf_config(name))
    tensors = write_weights(tmp_path, found, description)
    auto = AutoBridge.from_hf_pretrained(tmp_path, trust_remote_code=True)

    model = provided(auto)
    auto.load_hf_weights([model])

    assert type(model.config) is bridge.BlocksProvider
    parameters = live(model)
    for key, expected in converted(found, description, tensors).items():
        assert torch.equal(parameters[key].cpu(), expected.cpu()), key
    exported = {each.param_name: each.weight for each in auto.export_hf_weights([model], cpu=True, show_progress=False)}
    assert set(exported) == set(tensors)
    assert all(torch.equal(exported[key], tensor) for key, tensor in tensors.items())


@needs_bridge
def test_a_model_with_padded_rows_exports_only_the_vocabulary(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge import AutoBridge

    found, description = described("NemotronForCausalLM")
    write_config(tmp_path, hf_config("NemotronForCausalLM"))
    tensors = write_weights(tmp_path, found, description)
    auto = AutoBridge.from_hf_pretrained(tmp_path)

    model = provided(auto, should_pad_vocab=True, make_vocab_size_divisible_by=1024)
    auto.load_hf_weights([model])

    assert model.embedding.word_embeddings.weight.shape[0] == 1024 > description.vocab_size
    exported = {each.param_name: each.weight for each in auto.export_hf_weights([model], cpu=True, show_progress=False)}
    assert torch.equal(exported["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


@needs_bridge
def test_a_checkpoint_without_a_tensor_is_refused(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge import AutoBridge
    from safetensors.torch import load_file, save_file

    found, description = described("NemotronForCausalLM")
    write_config(tmp_path, hf_config("NemotronForCausalLM"))
    write_weights(tmp_path, found, description)
    kept = load_file(tmp_path / "model.safetensors")
    del kept["model.layers.1.mlp.up_proj.weight"]
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto = AutoBridge.from_hf_pretrained(tmp_path)

    with pytest.raises(
        ValueError,
        match=r"1 tensors are missing from the .*, such as model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        auto.load_hf_weights([provided(auto)])


@needs_bridge
@every_model
def test_the_provider_returns_the_config_of_the_model(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path, name: str
) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    found, description = described(name)
    write_config(tmp_path, hf_config(name))
    auto = AutoBridge.from_hf_pretrained(tmp_path, trust_remote_code=True)

    config = get_model_bridge(found.architecture).megatron_to_hf_config(auto.to_megatron_provider(load_weights=False))

    assert read(config) == (found, description)


@needs_bridge
def test_a_provider_changed_beyond_its_class_is_refused(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    found, _ = described("LlamaForCausalLM")
    write_config(tmp_path, hf_config("LlamaForCausalLM"))
    provider = AutoBridge.from_hf_pretrained(tmp_path, trust_remote_code=True).to_megatron_provider(load_weights=False)
    provider.sections = to_config(described("NemotronHForCausalLM")[1])

    with pytest.raises(
        ValueError, match=rf"{found.architecture} cannot express this model: .*; export it with nemo-ext"
    ):
        get_model_bridge(found.architecture).megatron_to_hf_config(provider)


@needs_bridge
def test_a_saved_provider_is_restored(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    _, description = described("DeciLMForCausalLM")
    write_config(tmp_path, hf_config("DeciLMForCausalLM"))
    provider = AutoBridge.from_hf_pretrained(tmp_path, trust_remote_code=True).to_megatron_provider(load_weights=False)

    with safe_yaml_representers():
        saved = yaml.safe_dump(_ConfigContainerBase._convert_value_to_dict(provider))
    restored = instantiate(yaml.safe_load(saved))

    assert type(restored) is bridge.BlocksProvider
    assert restored.sections == to_config(description)
    assert restored.hybrid_stack_spec is bridge.stack_spec


@needs_bridge
def test_moe_blocks_of_different_sizes_are_refused(
    modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge import AutoBridge

    words = ["run_dir=unused", "data=mock", "model=nemotron3_nano_tiny", "model.pattern=E{experts=4}E", *SIGMOID]
    description = from_config(compose("train", words))
    write_config(tmp_path, FORMATS["NemoExtBlocksForCausalLM"].write(description))
    auto = AutoBridge.from_hf_pretrained(tmp_path, trust_remote_code=True)

    with pytest.raises(ValueError, match=r"different numbers of experts \(4, 8\)"):
        auto.to_megatron_provider(load_weights=False)


PAGE = Path(__file__).parents[2] / "docs" / "bridge.md"
(SNIPPET,) = re.findall(r"```py\n(from megatron\.bridge\.peft\.lora .*?)```", PAGE.read_text(), re.S)
"""LoRA as in docs/bridge.md."""


def pretrained(folder: Path, name: str) -> Any:
    """AutoBridge of a Hugging Face model with random weights that keep the magnitude of activations."""
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file

    write_config(folder, hf_config(name))
    tensors = write_weights(folder, *described(name))
    scaled = {key: 1 + 0.1 * each if each.dim() == 1 else 0.1 * each for key, each in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoBridge.from_hf_pretrained(folder, trust_remote_code=True)


@needs_bridge
@pytest.mark.parametrize("name", ["NemotronHForCausalLM", "NemoExtBlocksForCausalLM", "DeciLMForCausalLM"])
def test_bridges_own_lora_trains_our_models_and_exports_them_merged(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    auto = pretrained(tmp_path, name)
    model = provided(auto)
    auto.load_hf_weights([model])
    ids = torch.arange(48).reshape(2, 24) * 7 % 100
    places = torch.arange(24).expand(2, -1)
    losses: list[float] = []

    def train(chunks: list[torch.nn.Module]) -> None:
        (chunk,) = chunks
        learning = {name: each for name, each in chunk.named_parameters() if each.requires_grad}
        assert learning and all(".adapter." in name for name in learning)
        optimizer = torch.optim.Adam(learning.values(), lr=0.02)
        for _ in range(3):
            losses.append(float((loss := chunk(ids, places, None, labels=ids.roll(-1, 1)).mean()).detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    given: dict[str, Any] = {"bridge": auto, "model": [model], "train": train}
    exec(SNIPPET, given)

    assert losses[2] < losses[0]
    before, merged = load_file(tmp_path / "model.safetensors"), given["merged"]
    assert set(merged) == set(before)
    changed = {key for key, tensor in merged.items() if not torch.equal(tensor, before[key])}
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "out_proj")
    linear = {each for each in before if before[each].dim() > 1 and any(f"{name}" in each for name in targets)}
    assert changed == linear
    save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float32).eval()
    model.eval()
    with torch.no_grad():
        ours, exported = model(ids, places, None), theirs(ids).logits
        given["lora"].disable_adapter_layers([model])
        bare = model(ids, places, None)
    assert (ours - bare).abs().max() > 100 * (ours - exported).abs().max()
    torch.testing.assert_close(ours, exported, rtol=1e-4, atol=1e-5)


@needs_bridge
def test_adapters_are_exported_with_the_heads_of_their_block(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge.peft.lora import LoRA

    found, description = described("DeciLMForCausalLM")
    auto = pretrained(tmp_path, "DeciLMForCausalLM")
    (model,) = LoRA(target_modules=["linear_qkv"], dim=4)([provided(auto)], training=True)

    exported = {each.param_name: each.weight for each in auto.export_adapter_weights([model], show_progress=False)}

    rows = {
        name: shape[0]
        for entry in found.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    assert len(set(rows.values())) > 2
    assert {key: len(tensor) for key, tensor in exported.items() if "lora_B" in key} == {
        name.replace(".weight", ".lora_B.weight"): size for name, size in rows.items()
    }


@needs_bridge
def test_an_adapter_behind_an_output_norm_is_refused(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    from megatron.bridge.peft.lora import LoRA

    auto = pretrained(tmp_path, "Olmo3ForCausalLM")
    model = LoRA(dim=4)([provided(auto)], training=True)

    with pytest.raises(ValueError, match=r"linear_proj has an adapter, which is added after the block's output norm"):
        list(auto.export_hf_weights(model, show_progress=False))


@needs_bridge
def test_an_adapter_of_mamba_that_tensor_ranks_divide_is_refused(
    megatron: None, modules_cache: None, registered: nemo_ext.Registration, tmp_path: Path
) -> None:
    """Simulated by the attributes of a tensor-parallel model, whose parts are not contiguous."""
    from megatron.bridge.peft.lora import LoRA

    auto = pretrained(tmp_path, "NemoExtBlocksForCausalLM")
    model = LoRA(target_modules=["in_proj"], dim=4)([provided(auto)], training=True)
    wrapped = next(each.to_wrap for name, each in model[0].named_modules() if name.endswith("mixer.in_proj"))
    wrapped.config = copy.copy(wrapped.config)
    wrapped.config.tensor_model_parallel_size = 2

    with pytest.raises(ValueError, match=r"in_proj has an adapter, .*: export with tensor_model_parallel_size=1"):
        list(auto.export_hf_weights(model, show_progress=False))
