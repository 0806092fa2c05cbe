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
                        f"data.streams: {stream['name']}: {missing} does not exist; tokenise the stream first "
                        "(`nemo-ext tokenize`), set its prefix, or choose data=local_text"
                    )
    for split in ("train", "valid"):
        blend = [word for s in data["streams"] for word in (str(s["weight"]), f"{paths[s['name']]}_{split}")]
        megatron.setdefault(f"{split}_data_path", blend)
    tokenizer = load_tokenizer(data["tokenizer"])
    for name, value in megatron_arguments(tokenizer).items():
        if megatron.get(name) is None:
            megatron[name] = value
    rows = megatron.get("padded_vocab_size")
    if rows is not None and tokenizer.vocab_size > int(rows):
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embedding rows: choose the model's own "
            "tokenizer, or set megatron.padded_vocab_size"
        )
