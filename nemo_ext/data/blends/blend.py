"""Conversion of a config's blend to Megatron's data arguments."""

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.hierarchy import Leaf, read_tree
from nemo_ext.data.blends.plan import LIMITS, plan_blend, some_of
from nemo_ext.data.blends.sizes import indexed_tokens
from nemo_ext.data.packs.packed_files import is_packed
from nemo_ext.data.text.manifest import read_manifest
from nemo_ext.data.text.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, megatron_arguments
from nemo_ext.job.progress import notice


def flattened(data: Mapping[str, Any], shares: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a `data` section with its blend as a flat list of `streams`.

    Args:
        data: A `data` section. If it already has `streams`, only `max_epochs` and `refuse_epochs` are removed.
        shares: Weights of the streams; None for equal weights, which suffice for tokenising.

    Raises:
        ValueError: The blend is invalid.
    """
    rest = {key: value for key, value in data.items() if key not in ("blend", *LIMITS)}
    if data.get("blend") is None:
        return rest
    streams = []
    for leaf in read_tree(data).leaves():
        weight = 1.0 if shares is None else float(shares[leaf.name])
        streams.append({"name": leaf.name, "weight": weight, "prefix": str(leaf.prefix)})
        if leaf.source is not None:
            streams[-1]["source"] = leaf.source
    return rest | {"streams": streams}


def tokens_of_run(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a training run reads from `data`; None if the config does not determine it.

    This is steps x batch size x sequence length or, if one of these is not set, `train.tokens`. If some phases have
    separate data, it is the sum over the other phases.
    """
    phases = [phase for phase in (config.get("phases") or {}).values() if isinstance(phase, Mapping)]
    if any(phase.get("data") is not None for phase in phases):
        tokens = [phase.get("tokens") for phase in phases if phase.get("data") is None]
        return round(sum(float(number) for number in tokens if isinstance(number, int | float))) or None
    megatron = config.get("megatron") or {}
    sizes = [megatron.get(key) for key in ("train_iters", "global_batch_size", "seq_length")]
    if all(sizes):
        steps, batch, length = (int(size) for size in sizes if size is not None)
        return steps * batch * length
    whole = (config.get("train") or {}).get("tokens")
    return None if whole is None else round(float(whole))


def planned(config: Mapping[str, Any], *, tokens: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan a run's blend: return its `data` section as a flat blend, and Megatron's data and tokenizer arguments.

    Arguments that the user has set are not returned. Streams that will be read more than `max_epochs` times cause a
    warning.

    Args:
        tokens: number of tokens read from this blend; None for the whole run's tokens.

    Raises:
        ValueError: a stream without a source has no tokenised files, or files of a different tokenizer; the blend is
            invalid (see `plan_blend`), the validation share is 0, or the vocabulary is invalid (see
            `check_vocabulary`).
    """
    data, megatron = config["data"], ChainMap[str, Any]({}, config["megatron"])
    tokenizer = load_tokenizer(data["tokenizer"])
    for leaf in read_tree(data).leaves():
        if leaf.source is not None and data.get("validation_share") == 0:
            raise ValueError(
                f"data.validation_share=0 leaves stream {leaf.name} without validation data: set it above 0"
            )
        if leaf.source is None:
            for split in ("train", "valid"):
                missing = Path(f"{leaf.prefix}_{split}.idx")
                if not missing.is_file():
                    raise ValueError(
                        f"{leaf.where}: {missing} of stream {leaf.name} does not exist; tokenise the stream first with "
                        "a validation_share above 0 (`nemo-ext tokenize`), correct its prefix, or choose "
                        "data=local_text"
                    )
            _check_tokenizer(leaf, tokenizer)
    plan = plan_blend(data, tokens_of_run(config) if tokens is None else tokens, before_tokenising=True)
    if warning := plan.warning():
        notice(f"data: {warning}")
    for split in ("train", "valid"):
        megatron.setdefault(f"{split}_data_path", plan.megatron_words(split))
    if megatron.get("tokenizer_type") is None:
        # Training needs only the number of ids and the end-of-document id, so transformers is not imported.
        megatron |= megatron_arguments(tokenizer, ids_only=True)
    check_vocabulary(tokenizer.vocab_size, config)
    return flattened(data, {name: float(share) for name, share in plan.shares.items()}), dict(megatron.maps[0])


def shares_of(words: Sequence[object]) -> dict[str, float]:
    """Return the shares of a blend, keyed by prefix, summing to 1.

    Args:
        words: Megatron's list: weight, prefix, weight, prefix, ..., or a single prefix.

    Raises:
        ValueError: there are several prefixes without weights, for which Megatron computes shares from the sizes.
    """
    words = [words] if isinstance(words, str) else words
    if len(words) == 1:
        return {str(words[0]): 1.0}
    shares: dict[str, float] = {}
    try:
        for weight, prefix in zip(words[::2], words[1::2], strict=True):
            shares[str(prefix)] = shares.get(str(prefix), 0.0) + float(str(weight))
    except ValueError:
        raise ValueError(
            f"megatron.train_data_path={list(words)}: a run with phases requires a weight before each prefix"
        ) from None
    total = sum(shares.values())
    if shares and not total > 0:
        raise ValueError(
            f"megatron.train_data_path={list(words)}: the weights add up to {total:g}; make at least one positive"
        )
    return {prefix: share / total for prefix, share in shares.items()}


def _check_tokenizer(leaf: Leaf, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the manifest of a stream's files names a tokenizer other than `tokenizer`.

    Files made by other tools have no manifest and are accepted.
    """
    if not Path(f"{leaf.prefix}.json").is_file():
        return
    manifest = read_manifest(leaf.prefix)
    if manifest.tokenizer_identity != tokenizer.identity:
        raise ValueError(
            f"{leaf.where}: {leaf.prefix} was tokenised with {manifest.tokenizer}, not with data.tokenizer; tokenise "
            f"stream {leaf.name} again, or set data.tokenizer to that tokenizer"
        )


def other_order(before: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return a warning about streams that Megatron shuffles differently after resuming; None if there are none.

    Megatron's GPTDataset shuffles all epochs of a run together, so a stream's order depends on its number of epochs.
    Packs, mixed lengths and phases keep their order.

    Args:
        before: config with which the run was started, including data arguments.
        config: config with which the run is resumed.
    """
    old, new = _epochs(before), _epochs(config)
    changed = [
        f"{name} {old[name][0]:.3g} -> {new[name][0]:.3g}"
        for name in new
        if name in old and old[name][1] != new[name][1]
    ]
    if not changed:
        return None
    return (
        f"the number of epochs differs from the start of this run, so Megatron shuffles these streams differently: "
        f"{some_of(changed)}. Some sequences may be read again and others never; a run in phases keeps its order "
        "(docs/phases.md)"
    )


def _epochs(config: Mapping[str, Any]) -> dict[str, tuple[float, tuple[int, bool]]]:
    """Return the number of epochs of each training stream and its order key, keyed by prefix.

    Megatron reads a stream in the same order if its order key is the same: the number of epochs begun, and whether the
    last one is shuffled separately (megatron/core/datasets/gpt_dataset.py, `_build_document_sample_shuffle_indices`).
    Packs and streams without files are omitted.
    """
    megatron = config["megatron"]
    words = megatron.get("train_data_path")
    steps, batch, length = (megatron.get(key) for key in ("train_iters", "global_batch_size", "seq_length"))
    if not (words and steps and batch and length) or (config.get("data") or {}).get("mixed_lengths"):
        return {}
    try:
        shares = shares_of(words)
    except ValueError:
        return {}  # Megatron computes the shares from the sizes
    epochs = {}
    for prefix, share in shares.items():
        if not Path(f"{prefix}.idx").is_file() or is_packed(prefix):
            continue
        tokens, sequences = indexed_tokens(Path(f"{prefix}.idx")), int(steps) * int(batch)
        read = sequences * int(length) * share / tokens
        if len(shares) > 1:
            # Megatron's blended dataset takes half a percent more of each stream (`mid_level_dataset_surplus`).
            sequences = math.ceil(math.ceil(sequences * share) * 1.005)
        epochs[prefix] = read, _order(sequences, int(length), tokens)
    return epochs


def _order(sequences: int, length: int, tokens: int) -> tuple[int, bool]:
    epochs = -(-(sequences * length + 1) // tokens)
    if epochs == 1:
        return 1, False
    last = sequences - ((epochs - 1) * tokens - 1) // length
    return epochs, last < int(0.8 * ((tokens - 1) // length))
