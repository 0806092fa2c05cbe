"""Puzzle children of hybrid models: `NemotronHPuzzleForCausalLM`, the format of Nemotron 3 Puzzle 75B.

config.json has the keys of `NemotronHForCausalLM`, and `block_configs` with one entry per block, whose keys override
the top-level ones. vLLM serves the format with its own NemotronH class (vllm/model_executor/models/nemotron_h.py) and
the configuration file next to the weights; transformers loads it with the modelling file.
"""

from dataclasses import replace
from typing import Any

from nemo_ext.architecture.blocks import Block
from nemo_ext.checkpoint.description import Description, Router
from nemo_ext.checkpoint.formats.format import Keys, check_layers, refuse
from nemo_ext.checkpoint.formats.hybrid import (
    KNOWN,
    LATENT,
    NEMOTRON_H,
    SIZES,
    TYPES,
    has_depths,
    read_depths,
    read_hybrid,
    read_router,
    read_sizes,
    write_hybrid,
)
from nemo_ext.job.settings import nearest

_NORMALISED, _TYPE = "norm_topk_prob", "block_type"
_ROUTER = ("routed_scaling_factor", "n_group", "topk_group", _NORMALISED)
_FURTHER = {"*": ("sliding_window",), "E": (LATENT, *_ROUTER)}
"""Keys of a block besides its sizes."""
_PATTERNS = (
    ("block_configs", "hybrid_override_pattern", "layers_block_type"),
    ("mtp_block_configs", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
)
"""Lists of blocks, each with the keys that repeat their kinds as letters and as types."""


def _write(description: Description) -> dict[str, Any]:
    blocks = (*description.blocks, *description.prediction)
    windows = any(block.kind == "*" and block.get("window") for block in blocks)
    refuse((windows, "sliding windows in the export's modelling file for transformers"))
    by_block = {*SIZES["E"], *SIZES["-"], LATENT}  # as in the published model, also if all blocks have one value
    for key, (size, _) in SIZES["*"].items():
        if len({block.get(size) for block in blocks if block.kind == "*"}) > 1:
            by_block.add(key)
    facts = write_hybrid(description, "nemotron_h_puzzle", "NemotronHPuzzleForCausalLM", by_block)

    def entry(block: Block) -> dict[str, Any]:
        values = {key: block.size(size) for key, (size, _) in SIZES[block.kind].items() if key in by_block}
        if block.kind == "E":
            if latent := block.size("latent"):
                values[LATENT] = latent
            if (block.size("topk") > 1) != facts[_NORMALISED]:
                values[_NORMALISED] = not facts[_NORMALISED]
        return {_TYPE: TYPES[block.kind], **values}

    depth = description.prediction[: len(description.architecture.pattern.mtp)]
    return facts | {
        "auto_map": {
            "AutoConfig": "configuration_nemotron_h_puzzle.NemotronHPuzzleConfig",
            "AutoModelForCausalLM": "modeling_nemotron_h_puzzle.NemotronHPuzzleForCausalLM",
        },
        "layers_block_type": [TYPES[block.kind] for block in description.blocks],
        "block_configs": [entry(block) for block in description.blocks],
        "mtp_block_configs": [entry(block) for block in depth],
    }


def _read(keys: Keys) -> Description:
    main, routers = _read_blocks(keys, *_PATTERNS[0])
    check_layers(keys, len(main), _PATTERNS[0][0])
    depth, more = _read_blocks(keys, *_PATTERNS[1]) if has_depths(keys) else ((), {})
    router = None
    for where, found in (routers | more).items():
        router = router or found
        if found != router:
            raise ValueError(
                f"config.json: {where}.routed_scaling_factor={found.scaling} differs from {router.scaling} of an "
                "earlier block: Megatron has one factor for all blocks, so this checkpoint cannot be converted; "
                "choose another"
            )
    prediction = (depth, read_depths(keys, len(depth))) if depth else ((), 0)
    return read_hybrid(keys, main, prediction, router=router, family="nemotron3_puzzle")


def _read_blocks(keys: Keys, name: str, letters: str, types: str) -> tuple[tuple[Block, ...], dict[str, Router]]:
    """Read a list of blocks from config.json, and check the optional keys that repeat the kinds of its blocks.

    Args:
        name: key of the list, such as `block_configs`.
        letters: optional key with one letter per block.
        types: optional key with the list of block types.

    Returns:
        The blocks with all their sizes, and the expert routing of each MoE block, keyed by its path in config.json,
        such as `block_configs[3]`.
    """
    entries = keys.get(name)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"config.json: {name}={entries!r}: expected a list with one entry per block")
    found = {f"{name}[{index}]": _read_block(keys, f"{name}[{index}]", entry) for index, entry in enumerate(entries)}
    kinds = [block.kind for block, _ in found.values()]
    aliases = {"linear_attention": "mamba", "full_attention": "attention"}
    repeated = keys.get(types, [TYPES[kind] for kind in kinds])
    if not isinstance(repeated, list) or [aliases.get(kind, kind) for kind in map(str, repeated)] != [
        TYPES[kind] for kind in kinds
    ]:
        raise ValueError(f"config.json: {types} does not match the block_type of {name}: correct one of them")
    if keys.get(letters) not in (None, "", "".join(kinds)):
        raise ValueError(f"config.json: {letters}={keys.get(letters)!r} does not match {name}: correct one of them")
    routers = {where: router for where, (_, router) in found.items() if router is not None}
    return tuple(block for block, _ in found.values()), routers


def _read_block(keys: Keys, where: str, entry: Any) -> tuple[Block, Router | None]:
    if not isinstance(entry, dict):
        raise ValueError(f"config.json: {where}: expected a mapping with block_type, got {entry!r}")
    kinds = {name: kind for kind, name in TYPES.items()}
    kind = kinds.get(str(entry.get(_TYPE)))
    if kind is None:
        raise ValueError(f"config.json: {where}.{_TYPE}={entry.get(_TYPE)!r}: expected one of {', '.join(kinds)}")
    known = (*SIZES[kind], *_FURTHER.get(kind, ()))
    own = {key: value for key, value in entry.items() if value is not None and key != _TYPE}
    for key in own:
        if key not in known:
            raise ValueError(
                f"config.json: {where}.{key}={own[key]!r}: unknown key of a {TYPES[kind]} block; {nearest(key, known)}"
            )
    merged = Keys({**keys.values, **own}, f"{where}.")
    merged.read = keys.read
    if kind == "E":
        for key in SIZES["E"]:
            if merged.get(key) is None:
                raise ValueError(f"config.json: {where}.{key} is missing: set it there or for all blocks")
        return read_sizes(merged, {"E"})[0], read_router(merged)
    window = merged.integer("sliding_window") if kind == "*" and merged.get("sliding_window") is not None else None
    merged.values = {key: value for key, value in merged.values.items() if key != "sliding_window"}
    (block,) = read_sizes(merged, {kind})
    if window is not None:
        block = Block.from_values("*", **{**dict(block.values), "window": window})
    return block, None


NEMOTRON_H_PUZZLE = replace(
    NEMOTRON_H,
    architecture="NemotronHPuzzleForCausalLM",
    model_type="nemotron_h_puzzle",
    write=_write,
    read=_read,
    outside={"embedding": "model.embeddings", "final_norm": "model.norm_f", "head": "lm_head"},
    layer="model.layers.{layer}.",
    code=("configuration_nemotron_h_puzzle.py", "modeling_nemotron_h_puzzle.py"),
    known=KNOWN | {"mtp_block_configs", "blockwise_members"},
    remarks=lambda description: [
        "NemotronHPuzzleForCausalLM: vLLM serves it with its own class, and transformers with the file in the folder; "
        "both require trust_remote_code=True"
    ],
)
