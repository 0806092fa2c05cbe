"""Bridges that let Megatron-Bridge's `AutoBridge` read and write our models as block sequences.

Names come from the formats (`nemo_ext.checkpoint.formats`), and sizes from the description read from a config.json, so
no code is specific to a model family. This module maps checkpoint keys to names in the live model (`parameter_names`),
parameters to tensor-parallel layouts (`weights`), and Megatron flags to provider fields (`provider_fields`), all
without Megatron-Bridge. The classes at the end exist only if it can be imported.

Interfaces: Megatron-Bridge 0.6.2, models/conversion/model_bridge.py, param_mapping.py and models/hybrid.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from megatron.core.activations import squared_relu
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.pipeline import balance, parameter_counts
from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.formats import FORMATS, CannotExpress, Entry, Format, named, read
from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.rules import QKV, Vocabulary
from nemo_ext.megatron import versions
from nemo_ext.megatron.model import SECTION, BlockModelConfig

try:
    import transformers
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.bridge.models.conversion.param_mapping import (
        ColumnParallelMapping,
        FusedExpertMapping,
        GatedMLPMapping,
        MambaConv1dMapping,
        MambaInProjMapping,
        MegatronParamMapping,
        QKVMapping,
        ReplicatedMapping,
        RowParallelMapping,
    )
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
except (ImportError, OSError, RuntimeError, AttributeError) as error:  # broken CUDA libraries raise all of these
    MISSING: str | None = f"megatron-bridge cannot be imported here: {error}"
else:
    MISSING = None
"""Reason why Megatron-Bridge cannot be used; None if it can."""

_CONVOLUTION = "." if versions.installed() < (0, 19) else "_"
"""Separator between the names of Mamba's convolution, a submodule before Megatron-Core 0.19, and its tensors."""

SPELLINGS = (
    # Transformer Engine fuses a norm into the following linear, and checkpoints use its name for either back end.
    (r"self_attention\.linear_qkv\.layer_norm_(\w+)$", (r"input_layernorm.\1", r"\g<0>")),
    (r"mlp\.linear_fc1\.layer_norm_(\w+)$", (r"pre_mlp_layernorm.\1", r"\g<0>")),
    (r"mixer\.in_proj\.layer_norm_(\w+)$", (r"norm.\1", r"\g<0>")),
    # Mamba's tensors are saved in parts and are one tensor in memory; the convolution's mostly belong to the mixer.
    (r"mixer\.in_proj\.weight\.\w+$", ("mixer.in_proj.weight",)),
    (r"mixer\.conv1d\.(weight|bias)\.\w+$", (rf"mixer.conv1d{_CONVOLUTION}\1",)),
    # All experts of a block are saved as one tensor; in memory they are separate, or numbered weights (grouped GEMM).
    (
        r"mlp\.experts\.experts\.(\w+)\.weight$",
        (r"mlp.experts.local_experts.{expert}.\1.weight", r"mlp.experts.\1.weight{expert}"),
    ),
)
"""Patterns of checkpoint keys, each with the live model's names where these differ; the local back end's is first."""

KINDS = (
    ("in_proj", r"mixer\.in_proj\.weight$"),
    ("conv1d", r"mixer\.conv1d[._](weight|bias)$"),
    ("column", r"(linear_qkv|linear_fc1|eh_proj)\.(weight|bias)\d*$|mixer\.(A_log|D|dt_bias|norm\.weight)$"),
    ("row", r"(linear_proj|linear_fc2|out_proj)\.(weight|bias)\d*$"),
)
"""Tensor-parallel layouts, each with the pattern of its parameters' names; others are replicated on every rank."""


@dataclass(frozen=True)
class Weight:
    """Parameter of the live model, and the Hugging Face tensors that hold the same values.

    Attributes:
        names: names of the parameter, one per back end that spells it differently; the first is the local back end's.
        hf: names of the Hugging Face tensors: q, k, v for `qkv`, and gate, up for `gated`.
        kind: how the values are converted and split over tensor-parallel ranks: `qkv`, `gated`, `vocabulary`,
            `experts` (one expert of a Hugging Face tensor that holds all of them), `replicated`, or a layout in
            `KINDS`: `in_proj`, `conv1d`, `column` or `row`.
        rows: number of rows of the Hugging Face tensor, for `vocabulary`; the parameter may have more.
    """

    names: tuple[str, ...]
    hf: tuple[str, ...]
    kind: str
    rows: int = 0


def parameter_names(piece: Piece, expert: int = 0) -> tuple[str, ...]:
    """Return the names that a parameter can have in the live model, the local back end's first.

    Args:
        piece: the parameter's tensor in a Megatron checkpoint.
        expert: 0-based number of the expert, if the tensor holds all experts of a block.
    """
    for key, names in SPELLINGS:
        if re.search(key, piece.key):
            return tuple(re.sub(key, name, piece.key).format(expert=expert) for name in names)
    return (piece.key,)


def weights(hf_format: Format, description: Description) -> Iterator[Weight]:
    """Yield a model's parameters and saved buffers once, in model order, each paired with its Hugging Face tensors.

    Raises:
        ValueError: the format cannot express a block.
    """
    for entry in hf_format.entries(description):
        piece = entry.pieces[0]
        if ".experts.experts." not in piece.key:
            names = parameter_names(piece)
            rows = entry.shapes[0][0] if isinstance(entry.rule, Vocabulary) else 0
            yield Weight(names, entry.names, _kind(entry, names[0]), rows)
            continue
        for expert in range(piece.offset[0], piece.offset[0] + piece.shape[0]):
            names = parameter_names(piece, expert)
            yield Weight(names, entry.names, "experts" if hf_format.stacked_experts else _kind(entry, names[0]))


def _kind(entry: Entry, name: str) -> str:
    if isinstance(entry.rule, QKV):
        return "qkv"
    if isinstance(entry.rule, Vocabulary):
        return "vocabulary"
    if len(entry.names) == 2:
        return "gated"
    return next((kind for kind, names in KINDS if re.search(names, name)), "replicated")


RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "max_position_embeddings": "seq_length",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
}
NEGATED = {
    "disable_bias_linear": "add_bias_linear",
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "no_yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}
ELSEWHERE = {
    "swiglu": "activation_func",
    "squared_relu": "activation_func",
    "group_query_attention": "num_query_groups",
    "padded_vocab_size": "vocab_size",
    "use_rope_scaling": "the layer spec",
    "rope_scaling_factor": "the layer spec",
}
"""Mapping from flags without a provider field of their own to the field or place that takes their value instead."""


def provider_fields(description: Description) -> dict[str, Any]:
    """Return the provider fields (of TransformerConfig and HybridModelProvider) that a description sets.

    The vocabulary is the checkpoint's, without padding; the user's `should_pad_vocab` decides whether to pad it.
    """
    flags = to_config(description)["megatron"]
    fields: dict[str, Any] = {
        "is_hybrid_model": True,
        "hybrid_layer_pattern": compile_pattern(description.architecture.pattern).hybrid_layer_pattern,
        "mtp_num_layers": description.architecture.pattern.depths or None,
        "vocab_size": description.vocab_size,
        "gated_linear_unit": description.architecture.gated,
        "activation_func": {"silu": torch.nn.functional.silu, "relu2": squared_relu, "gelu": torch.nn.functional.gelu}[
            description.activation
        ],
    }
    for flag, value in flags.items():
        if flag in NEGATED:
            fields[NEGATED[flag]] = not value
        elif flag not in ELSEWHERE:
            fields[RENAMED.get(flag, flag)] = tuple(value) if isinstance(value, list) else value
    if description.rope is not None and description.rope.scaling == "yarn":
        # Megatron's fused RoPE drops YaRN's attention factor from packed sequences (rope_utils.py).
        fields["apply_rope_fusion"] = False
    return fields


def stack_spec(config: Any) -> ModuleSpec:
    """Build the layer spec of a model from its `BlocksProvider`, which is passed as `config`.

    This is a function at module level, so that a saved config can refer to it.
    """
    model, megatron = config.sections["model"], config.sections["megatron"]
    return BlockModelConfig(
        # Not the provider itself, because HybridModelConfig would overwrite its fields with defaults.
        transformer=SimpleNamespace(window_size=config.window_size, window_attn_skip_freq=config.window_attn_skip_freq),
        pattern=model["pattern"],
        **{name: model[name] for name in SECTION & model.keys()},
        llama3_rope_factor=megatron["rope_scaling_factor"] if megatron.get("use_rope_scaling") else None,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_percent,
        seq_len_interpolation_factor=config.seq_len_interpolation_factor,
    ).stack_spec()


def read_hf_config(config: Any) -> tuple[Format, Description]:
    """Return the format and description of a transformers config object.

    Raises:
        ValueError: the architecture is unknown, or Megatron cannot express a setting.
    """
    values: Mapping[str, Any] = config.to_dict()
    return read({key: _plain(value) for key, value in values.items()})


def _plain(value: Any) -> Any:
    """Convert dataclasses to dictionaries, because published DeciLM configs keep `block_configs` as objects."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def register_bridges(replace: Collection[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Register a bridge for every format that Megatron-Bridge does not serve with a bridge of its own.

    Args:
        replace: names of Hugging Face classes whose existing bridges are to be replaced by ours.

    Returns:
        Names of the Hugging Face classes that now have our bridge, and a mapping from skipped ones to the reason.

    Raises:
        ImportError: Megatron-Bridge cannot be imported.
        ValueError: `replace` names a class that none of our formats covers.
    """
    for architecture in replace:
        named(architecture)
    if MISSING is not None:
        raise ImportError(f"no bridge was registered, as {MISSING}; see `nemo-ext doctor megatron-bridge`")
    register_allowed_target_prefix("nemo_ext.")  # so that Megatron-Bridge restores our provider from its checkpoints
    registered, skipped = [], {}
    for architecture, hf_format in FORMATS.items():
        served = _served_by(architecture)
        ours = served is not None and issubclass(served, BlocksBridge)
        if served is not None and not ours and architecture not in replace:
            skipped[architecture] = f"Megatron-Bridge has {served.__name__}; name it in `replace` to use ours"
            continue
        if not ours:
            _register(hf_format)
        registered.append(architecture)
    return tuple(registered), skipped


def _served_by(architecture: str) -> type | None:
    """Return the class of the bridge registered for a Hugging Face class, or None if there is none."""
    try:
        return type(get_model_bridge(architecture))
    except NotImplementedError:
        return None


def _register(hf_format: Format) -> None:
    """Register a bridge for a format, silently replacing an earlier one for the same source.

    A source is a transformers class or its name (Megatron-Bridge's decorators/dispatch.py). `AutoBridge` looks up the
    class first, so our bridge is registered under both.
    """
    architecture = hf_format.architecture
    bridge = type(f"{architecture.removesuffix('ForCausalLM')}BlocksBridge", (BlocksBridge,), {"FORMAT": hf_format})
    for source in (architecture, getattr(transformers, architecture, None)):
        if source is not None:
            MegatronModelBridge.register_bridge(
                source=source, target=HybridModel, provider=BlocksProvider, model_type=hf_format.model_type
            )(bridge)


def in_stages(pattern: str, sections: Mapping[str, Any], stages: int) -> str:
    """Cut a pattern into pipeline stages with nearly equal parameter counts, unless it has cuts already.

    Megatron would give every stage the same number of blocks, which fails for most models that Puzzle produces.

    Args:
        pattern: Megatron's pattern, one letter per block.
        sections: `model` and `megatron` sections of our config that describe the model.
        stages: number of stages.
    """
    if stages == 1 or "|" in pattern:
        return pattern
    cuts = balance(Architecture.from_config(sections), pipeline_parallel=stages, cost=parameter_counts).cuts
    return format_pattern(replace(parse(pattern), cuts=cuts), compress=False)


def _check_adapter(name: str, wrapped: Any) -> None:
    """Reject an adapter that Megatron-Bridge would merge incorrectly.

    Args:
        name: name of the module.
        wrapped: linear layer that the module's adapter wraps; None if the module has no adapter.

    Raises:
        ValueError: the adapter cannot be merged; the message names the module and says what to change.
    """
    if hasattr(wrapped, "output_norm"):
        raise ValueError(
            f"{name} has an adapter, which is added after the block's output norm and cannot be merged into a weight: "
            "exclude linear_proj and linear_fc2 from the target modules"
        )
    if wrapped is not None and name.endswith("mixer.in_proj") and wrapped.config.tensor_model_parallel_size > 1:
        raise ValueError(
            f"{name} has an adapter, whose rows Megatron-Bridge would merge in the wrong order: export with "
            "tensor_model_parallel_size=1"
        )


if MISSING is None:

    class VocabularyMapping(ColumnParallelMapping):
        """Mapping of the embedding or output layer, which adds padding rows on import and removes them on export.

        Megatron-Bridge's own mapping pads only under tensor parallelism, and exports the padding.
        """

        def __init__(self, megatron_param: str, hf_param: str, rows: int) -> None:
            super().__init__(megatron_param, hf_param)
            self.rows = rows

        def resolve(self, captures: tuple[str, ...]) -> "VocabularyMapping":
            """Return a copy of this mapping, whose names have no wildcards to resolve."""
            return VocabularyMapping(self.megatron_param, self.hf_param, self.rows)

        def hf_to_megatron(self, hf_weights: torch.Tensor, megatron_module: Any) -> torch.Tensor:
            """Return this rank's rows `[padded vocabulary / tp, hidden]` of a Hugging Face weight.

            The weight, of the embedding or the output layer, has the shape `[vocabulary, hidden]`.
            """
            missing = megatron_module.weight.shape[0] * self.tp_size - hf_weights.shape[0]
            if missing > 0:
                hf_weights = torch.cat([hf_weights, hf_weights.new_zeros(missing, hf_weights.shape[1])])
            return super().hf_to_megatron(hf_weights, megatron_module)

        def megatron_to_hf(
            self, megatron_weights: torch.Tensor | None, megatron_module: torch.nn.Module | None
        ) -> dict[str, torch.Tensor]:
            """Return the whole weight `[vocabulary, hidden]` without padding rows, keyed by its Hugging Face name."""
            whole = super().megatron_to_hf(megatron_weights, megatron_module)
            return {name: table[: self.rows] for name, table in whole.items()}

    def mappings(weight: Weight) -> Iterator[MegatronParamMapping]:
        """Yield a weight's Megatron-Bridge mappings, one for each of its names."""
        plain = {
            "column": ColumnParallelMapping,
            "row": RowParallelMapping,
            "replicated": ReplicatedMapping,
            "in_proj": MambaInProjMapping,
            "conv1d": MambaConv1dMapping,
            "experts": FusedExpertMapping,
            "qkv": QKVMapping,
            "gated": GatedMLPMapping,
        }
        for name in weight.names:
            if weight.kind == "vocabulary":
                yield VocabularyMapping(name, weight.hf[0], weight.rows)
            else:
                yield plain[weight.kind](name, *weight.hf)

    @dataclass
    class BlocksProvider(HybridModelProvider):
        """Provider of our block stack: a HybridModelProvider whose layer spec is built from `sections`.

        Attributes:
            sections: `model` and `megatron` sections of our config that describe the model (`description.to_config`).
            yarn_rotary_scaling_factor: this and the following fields are YaRN's settings, which HybridModel reads from
                the config; the defaults have no effect.
        """

        sections: dict[str, Any] = field(default_factory=dict)
        hybrid_layer_pattern: str | None = None
        hybrid_stack_spec: Any = stack_spec
        yarn_rotary_scaling_factor: float = 1.0
        yarn_original_max_position_embeddings: int = 4096
        yarn_beta_fast: float = 32.0
        yarn_beta_slow: float = 1.0
        yarn_mscale: float = 1.0
        yarn_mscale_all_dim: float = 0.0
        yarn_correction_range_round_to_int: bool = True

        def finalize(self) -> None:
            """Check the fields, and cut the pattern into pipeline stages before HybridModelProvider finalises them.

            Raises:
                ValueError: the pattern is empty, or this stack does not support `mamba_chunk_size`.
            """
            if self.mamba_chunk_size != 128:
                raise ValueError(f"mamba_chunk_size={self.mamba_chunk_size} is not supported: set it to 128")
            pattern = self.hybrid_layer_pattern or ""
            if parse(pattern).blocks == ():
                raise ValueError("hybrid_layer_pattern is empty: create the provider with AutoBridge")
            if self.num_layers_in_first_pipeline_stage is None and self.num_layers_in_last_pipeline_stage is None:
                self.hybrid_layer_pattern = in_stages(pattern, self.sections, self.pipeline_model_parallel_size)
            super().finalize()

    class BlocksBridge(MegatronModelBridge):
        """Bridge for one of our Hugging Face formats, `FORMAT`, from which its parameter mappings are derived."""

        FORMAT: ClassVar[Format]
        _described: Description | None = None

        @property
        def description(self) -> Description:
            """Description of the Hugging Face config that Megatron-Bridge gave this bridge.

            Raises:
                ValueError: there is no config, or it belongs to another format.
            """
            if self._described is not None:
                return self._described
            config = getattr(self, "hf_config", None)
            if config is None:
                raise ValueError("this bridge has no Hugging Face config: create the bridge with AutoBridge")
            hf_format, description = read_hf_config(config)
            if hf_format is not self.FORMAT:
                raise ValueError(
                    f"config.json is for {hf_format.architecture}, but this bridge is for {self.FORMAT.architecture}: "
                    "create the bridge with AutoBridge"
                )
            return description

        def provider_bridge(self, hf_pretrained: Any) -> BlocksProvider:
            """Build the provider of a Hugging Face model.

            Raises:
                ValueError: Megatron or Megatron-Bridge cannot express the model.
            """
            config = hf_pretrained.config
            description = read_hf_config(config)[1]
            experts = {b.size("experts") for b in description.blocks if b.kind == "E" and not b.is_linear}
            if len(experts) > 1:
                raise ValueError(
                    f"the MoE blocks have different numbers of experts ({', '.join(map(str, sorted(experts)))}), but "
                    "Megatron-Bridge assumes the same number in all: convert this model with nemo-ext convert"
                )
            dtype = self.dtype_from_hf(config, default=torch.float32)
            return BlocksProvider(
                **provider_fields(description),
                sections=to_config(description),
                make_vocab_size_divisible_by=self.make_vocab_size_divisible_by(description.vocab_size),
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                fp16=dtype == torch.float16,
            )

        @classmethod
        def megatron_to_hf_config(cls, provider: Any) -> dict[str, Any]:
            """Return the config.json contents for the model of a provider that one of these bridges built.

            Raises:
                ValueError: this format cannot express the provider's model.
            """
            dtype = "bfloat16" if provider.bf16 else "float16" if provider.fp16 else "float32"
            try:
                written = cls.FORMAT.write(from_config(provider.sections))
            except CannotExpress as reason:
                raise ValueError(
                    f"{cls.FORMAT.architecture} cannot express this model: {reason}; export it with nemo-ext convert, "
                    "which chooses the class"
                ) from reason
            return written | {"torch_dtype": dtype}

        def mapping_registry(self) -> MegatronMappingRegistry:
            """Return the mappings of all of the model's parameters, with full names instead of wildcards."""
            parameters = weights(self.FORMAT, self.description)
            return MegatronMappingRegistry(*(mapping for weight in parameters for mapping in mappings(weight)))

        def build_conversion_tasks(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
            """Build the conversion tasks; missing tensors are an error here, while MegatronModelBridge only warns.

            Raises:
                ValueError: a tensor is missing from the Hugging Face checkpoint, or a parameter has no mapping.
            """
            tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, *args, **kwargs)
            if None in tasks:
                names = self._megatron_global_param_names_all_pp_ranks(megatron_model)
                registry = self.mapping_registry()
                unknown = [name for name in names if registry.megatron_to_hf_lookup(name) is None]
                raise ValueError(
                    f"{self.FORMAT.architecture} has no tensor for {len(unknown)} parameters of the model, such as "
                    f"{unknown[0]}: undo the changes to the provider's fields"
                )
            source = getattr(getattr(hf_pretrained, "state", None), "source", None)
            if source is not None:
                needed = {name for weight in weights(self.FORMAT, self.description) for name in weight.hf}
                if missing := sorted(needed - set(source.get_all_keys())):
                    raise ValueError(
                        f"{len(missing)} tensors are missing from the Hugging Face checkpoint, such as {missing[0]}: "
                        "download or export it again"
                    )
            return tasks

        def stream_adapter_weights_megatron_to_hf(self, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
            """Export adapters as the base class does.

            No Hugging Face config is available here, so the model is described by its provider's `sections`.
            """
            chunk = megatron_model[0] if isinstance(megatron_model, list) else megatron_model
            while hasattr(chunk, "module"):
                chunk = chunk.module
            self._described = from_config(chunk.config.sections)
            return super().stream_adapter_weights_megatron_to_hf(megatron_model, *args, **kwargs)

        def build_adapter_conversion_tasks(self, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
            """Check all adapters, then build their conversion tasks as MegatronPeftBridge does.

            Raises:
                ValueError: an adapter cannot be merged into a weight, or would be merged incorrectly.
            """
            for chunk in megatron_model if isinstance(megatron_model, list) else [megatron_model]:
                for name, module in chunk.named_modules():
                    _check_adapter(name, getattr(module, "to_wrap", None))
            return super().build_adapter_conversion_tasks(megatron_model, *args, **kwargs)

        def _merge_lora_adapter_weights(
            self, megatron_model: Any, converted_weights_dict: dict[str, torch.Tensor], adapter_weights: Any
        ) -> Any:
            model = self._with_heads(converted_weights_dict, megatron_model)
            return super()._merge_lora_adapter_weights(model, converted_weights_dict, adapter_weights)

        def _get_fused_adapter_linear_out_slices(
            self, megatron_model: Any, base_hf_weight_names: Any, *args: Any, **kwargs: Any
        ) -> Any:
            model = self._with_heads(base_hf_weight_names, megatron_model)
            return super()._get_fused_adapter_linear_out_slices(model, base_hf_weight_names, *args, **kwargs)

        def _with_heads(self, names: Collection[str], megatron_model: Any) -> Any:
            """Return a stand-in for the model that has only a config, with the sizes of one attention block.

            Megatron-Bridge reads the sizes from the model's config when it splits QKV, but ours differ by block.

            Args:
                names: Hugging Face names of a block's q, k and v tensors; for other names, the model is returned.
                megatron_model: list of the model's pipeline stages on this rank.

            Raises:
                ValueError: no attention block has these tensors.
            """
            if not self._is_fused_qkv(names):
                return megatron_model
            entries = self.FORMAT.entries(self.description)
            rules = (entry.rule for entry in entries if isinstance(entry.rule, QKV) and set(entry.names) == set(names))
            rule = next(rules, None)
            if rule is None:
                raise ValueError(
                    f"the adapter cannot be merged: no attention block of {self.FORMAT.architecture} has the tensors "
                    f"{', '.join(sorted(names))}; exclude linear_qkv from the target modules"
                )
            config = copy.copy(megatron_model[0].config)
            config.num_attention_heads, config.num_query_groups = rule.heads, rule.groups
            config.kv_channels = rule.head_dim
            return [SimpleNamespace(config=config)]
