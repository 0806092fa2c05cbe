"""From the config's blend of streams to Megatron's data arguments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.tokenizers import load_tokenizer, megatron_arguments


def prefixes(data: Mapping[str, Any]) -> dict[str, Path]:
    """Stream name -> path of its tokenised files without `_train.bin`: the stream's own `prefix`, or directory/name."""
    directory = Path(data["directory"])
    return {stream["name"]: Path(stream.get("prefix") or directory / stream["name"]) for stream in data["streams"]}


def use_blend(config: dict[str, Any]) -> None:
    """Fills Megatron's data and tokenizer arguments from `config["data"]`; arguments that the user set stay.

    Raises:
        ValueError: for a stream without source whose tokenised files are missing, a weight that is not positive, or a
            tokenizer with more ids than the model has embedding rows.
    """
    data, megatron = config["data"], config["megatron"]
    paths = prefixes(data)
    for stream in data["streams"]:
        if float(stream["weight"]) <= 0:
            raise ValueError(f"data.streams: {stream['name']} has weight {stream['weight']}; give a positive share")
        if "source" not in stream:
            for split in ("train", "valid"):
                missing = Path(f"{paths[stream['name']]}_{split}.idx")
                if not missing.is_file():
                    raise ValueError(
                        f"data.streams: {stream['name']}: {missing} does not exist; tokenise the stream first with a "
                        "validation_share above 0 (`nemo-ext tokenize`), set its prefix, or choose data=local_text"
                    )
    for split in ("train", "valid"):
        blend = [word for s in data["streams"] for word in (str(s["weight"]), f"{paths[s['name']]}_{split}")]
        megatron.setdefault(f"{split}_data_path", blend)
    tokenizer = load_tokenizer(data["tokenizer"])
    if megatron.get("tokenizer_type") is None:
        # Training needs only the number of ids and the end of document, so not even transformers.
        megatron.update(megatron_arguments(tokenizer, ids_only=True))
    rows = megatron.get("padded_vocab_size")
    if rows is not None and tokenizer.vocab_size > int(rows):
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embedding rows: choose the model's own "
            "tokenizer, or set megatron.padded_vocab_size"
        )
