"""Megatron model config and builder for a block sequence, for `pretrain()` and for users' own Megatron code."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.megatron import transformer_engine
from nemo_ext.megatron.attention import Rotary
from nemo_ext.megatron.float8_modules import use_float8
from nemo_ext.megatron.fp8 import Precision
from nemo_ext.megatron.specs import StackOptions, hybrid_stack

SECTION = {"norm_affine", "norm_placement", "qk_norm_scope", "yarn_on_windowed"}
"""Fields of `BlockModelConfig` that a config's `model` section may set."""


@dataclass(kw_only=True)
class BlockModelConfig(HybridModelConfig):
    """Megatron's HybridModelConfig, extended by the fields that define the layer spec.

    Attributes:
        pattern: pattern in block notation, including per-block values.
        norm_affine: whether norms have weights (see `nemo_ext.megatron.specs.StackOptions`, also for the next two).
        norm_placement: position of the norm in each sub-layer.
        qk_norm_scope: extent of QK norms.
        llama3_rope_factor: factor of Llama 3's RoPE frequency scaling, or None.
        yarn_on_windowed: whether windowed blocks of a YaRN model also use YaRN; if False, plain RoPE (OLMo 3).
        precision: precision plan for the modules that deviate from the model's precision, or None.
    """

    builder: ClassVar[str] = "nemo_ext.megatron.model.BlockModelBuilder"
    pattern: str = ""
    norm_affine: bool = True
    norm_placement: str = "input"
    qk_norm_scope: str = "head"
    llama3_rope_factor: float | None = None
    yarn_on_windowed: bool = True
    precision: Precision | None = None

    def stack_spec(self) -> ModuleSpec:
        """Build the layer spec that these fields describe."""
        pattern = parse(self.pattern)
        attention, of_depth = (
            {number: block for number, block in enumerate(blocks, start=1) if block.kind == "*"}
            for blocks in (pattern.blocks, pattern.mtp)
        )
        spec = hybrid_stack(
            self.pattern,
            norm_affine=self.norm_affine,
            norm_placement=self.norm_placement,
            qk_norm_scope=self.qk_norm_scope,
            rotary=self._rotary(attention),
            mtp_rotary=self._rotary(of_depth),
        )
        if self.position_embedding_type != "yarn" or self.yarn_on_windowed:
            return spec
        if self._windowed(of_depth):
            raise ValueError(
                "model.pattern: windowed attention in a prediction depth (/) is not supported with "
                "model.yarn_on_windowed=false: write *{window=none} there"
            )
        options: StackOptions = spec.params["options"]
        unscaled = {number: {"yarn_rotary_scaling_factor": 1.0} for number in self._windowed(attention)}
        merged = {n: {**options.overrides.get(n, {}), **unscaled.get(n, {})} for n in {*options.overrides, *unscaled}}
        spec.params["options"] = replace(options, overrides=merged)
        return spec

    def _rotary(self, attention: Mapping[int, Block]) -> dict[int, Rotary]:
        """Return rotary settings for the blocks that do not use HybridModel's embedding.

        `attention` has the model's attention blocks; it and the result are keyed by 1-based layer number.
        """
        plain = Rotary(
            base=self.rotary_base, percent=self.rotary_percent, interpolation_factor=self.seq_len_interpolation_factor
        )
        if self.position_embedding_type == "rope" and self.llama3_rope_factor is not None:
            return dict.fromkeys(attention, replace(plain, llama3_factor=self.llama3_rope_factor))
        if self.position_embedding_type != "yarn":
            return {}
        partial = dict.fromkeys(attention, replace(plain, yarn=True)) if self.rotary_percent != 1.0 else {}
        return partial if self.yarn_on_windowed else partial | dict.fromkeys(self._windowed(attention), plain)

    def _windowed(self, attention: Mapping[int, Block]) -> list[int]:
        config = self.transformer

        def windowed(number: int, block: Block) -> bool:
            window = block.get("window")
            if window is not None:
                return bool(window)  # 0 means no window
            return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)

        return [number for number, block in attention.items() if windowed(number, block)]


class BlockModelBuilder(HybridModelBuilder):
    """Megatron's HybridModelBuilder, with the layer spec of a `BlockModelConfig`."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Build one pipeline stage of the model (see `HybridModelBuilder.build_model`)."""
        assert isinstance(self._model_config, BlockModelConfig)
        self._model_config.hybrid_stack_spec = self._model_config.stack_spec()
        precision, transformer = self._model_config.precision, self._model_config.transformer
        build = partial(super().build_model, pg_collection, pre_process, post_process, vp_stage)
        if precision is None:
            return _on_device(transformer_engine.build(transformer, build))
        pipeline = pg_collection.pp
        stage = stage_blocks(parse(self._model_config.pattern), pipeline.rank(), pipeline.size(), vp_stage)
        if transformer.transformer_impl != "local":
            # The recipe of this stage alone: Megatron matches names within a stage.
            transformer.quant_recipe = precision.recipe_config(stage)
        model = transformer_engine.build(transformer, build)
        if transformer.transformer_impl == "local":
            use_float8(model, precision, stage)
        return _on_device(model)


def _on_device(model: HybridModel) -> HybridModel:
    """Move the model to the GPU if Megatron has left it on the CPU, as with `use_cpu_initialization`."""
    return model.cuda() if model.config.use_cpu_initialization and torch.cuda.is_available() else model


def stage_blocks(pattern: Pattern, rank: int, size: int, vp_stage: int | None) -> range:
    """Return the 0-based numbers of the blocks in a pipeline stage.

    Args:
        pattern: pattern with its cuts.
        rank: pipeline rank.
        size: number of pipeline ranks.
        vp_stage: number of the virtual stage on the rank; None if the rank has only one stage.
    """
    edges = (0, *pattern.cuts, len(pattern.blocks))
    stage = (vp_stage or 0) * size + rank
    return range(edges[stage], edges[stage + 1])


def model_config(
    model: Mapping[str, Any], pattern: str, arguments: argparse.Namespace, precision: Precision | None = None
) -> BlockModelConfig:
    """Build a run's model config.

    Args:
        model: the composed config's `model` section.
        pattern: pattern with pipeline cuts (`arguments.pattern_with_cuts`).
        arguments: Megatron's validated arguments.
        precision: precision plan, or None.
    """
    upstream = hybrid_config_from_args(arguments)  # its `model_config_cls` came with 0.19
    config = BlockModelConfig(**{f.name: getattr(upstream, f.name) for f in fields(upstream) if f.init})
    config.pattern = format_pattern(parse(pattern))
    for name in SECTION & model.keys():
        setattr(config, name, model[name])
    config.precision = precision
    config.llama3_rope_factor = arguments.rope_scaling_factor if arguments.use_rope_scaling else None
    return config
