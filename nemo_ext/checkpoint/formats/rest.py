"""Check of the config.json keys that a format does not read.

Keys of transformers and of trainers that do not affect the model are accepted. Any other key is ignored with a note if
its value disables it (null, false, zero, empty, a factor of one), and rejected otherwise, so that an unknown model
setting is never dropped silently.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

AROUND = frozenset(
    (
        # transformers' PreTrainedConfig
        *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "pruned_heads"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tokenizer_class", "tf_legacy_loss"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("prefix", "initializer_range", "pretraining_tp", "max_position_embeddings", "gradient_checkpointing"),
        # generation, before it was moved to generation_config.json
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
        *("diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "remove_invalid_values", "num_logits_to_keep", "output_router_logits"),
        # further keys in published folders
        *("max_sequence_length", "model_max_length", "max_seq_len", "max_seq_length", "seq_length", "n_ctx"),
        *("name_or_path", "tokenizer_model", "chat_template", "license", "transformers.js_config"),
        "is_llama_config",
    )
)
"""Keys that do not affect the model."""
_AROUND = re.compile(
    r"_.*|use_flash_attn.*|.*pdrop|.*_(token|token_id|token_ids|token_index|version|implementation|dropout)|unsloth_.*"
)
"""Further keys that do not affect the model: private names, token ids, versions, and dropout, used only in training."""
_SHAPE = re.compile(r"(num|n)_.*|.*(dim|size|heads|channels|rank|width|layers|experts|groups|percent|pct)")
"""Pattern of keys that determine the shape of a weight or the rotated part of a head."""
_FACTOR = re.compile(r".*(scale|scaling|multiplier|factor)$")


def ignored_keys(
    config: Mapping[str, Any], read: Collection[str], known: Collection[str], architecture: str
) -> list[str]:
    """Return the unread keys whose value disables them, in config.json order.

    Args:
        known: keys of the format's class that have no effect in Megatron, or only affect blocks that this model does
            not have.

    Raises:
        ValueError: a key is neither read, nor known, nor disabled.
    """
    rest = [key for key in config if key not in read and key not in known and key not in AROUND]
    rest = [key for key in rest if not _AROUND.fullmatch(key)]
    on = [key for key in rest if not _is_off(key, config[key])]
    if on:
        advice = "delete it only if it has no effect on the model"
        if any(map(_SHAPE.fullmatch, on)):
            advice = "this checkpoint cannot be converted; choose another"
        raise ValueError(
            f"config.json: {', '.join(f'{key}={config[key]!r}' for key in on)} is not supported for {architecture}, "
            f"and ignoring it could change the model: {advice}"
        )
    return rest


def _is_off(key: str, value: Any) -> bool:
    if _FACTOR.fullmatch(key) and not isinstance(value, bool) and value is not None:
        return bool(value == 1)
    return not value
