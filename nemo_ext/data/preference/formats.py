"""Pairs in the formats that trainers read.

TRL       {prompt, chosen, rejected: lists of messages, tools, chat_template_kwargs}; with a template all three are text
NeMo-RL   {context: messages, completions: [{rank: 0, completion: messages}, {rank: 1, ...}]} (PreferenceDataset)

If answers have scores, TRL's records have `chosen_score` and `rejected_score`, and NeMo-RL's completions have `reward`,
which RPO trains on.

Both read JSONL through Hugging Face `datasets`, which infers a column's type from the first lines of a file and fails
on keys that first occur later. So all records of a file have the same keys, and the first lines have a value for every
key (`Columns`). Only call arguments may have different keys, as `datasets` versions with the `Json` type return
them unchanged. Tools are JSON strings, which TRL decodes.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

LABELS = ("id", "source", "kind", "task", "language", "chosen_model", "rejected_model")
_SCORES = ("chosen_score", "rejected_score")
JsonObject = dict[str, Any]
_OPEN = ("arguments",)


def trl_record(staged: Mapping[str, Any]) -> JsonObject:
    """Return a pair as a record for TRL's DPOTrainer, with an explicit prompt.

    `staged` is a pair's line as written by `build`. If it has `texts`, rendered by a template, the record holds these.
    """
    labels = {key: staged[key] for key in LABELS} | {key: staged[key] for key in _SCORES if staged.get(key) is not None}
    if texts := staged.get("texts"):
        return dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) | labels
    return {
        "prompt": staged["prompt"],
        "chosen": staged["chosen"],
        "rejected": staged["rejected"],
        "tools": _tools(staged),
        "chat_template_kwargs": {"enable_thinking": staged["thinking"]},
        **labels,
    }


def nemo_rl_record(staged: Mapping[str, Any]) -> JsonObject:
    """Return a pair as a record for NeMo-RL's PreferenceDataset; see `trl_record` for `staged`.

    Rendered pairs require `policy.tokenizer.chat_template: null` in NeMo-RL's config.

    NeMo-RL does not pass tools to the template (nemo_rl/data/processors.py, preference_preprocessor), so the model sees
    a pair's tools only if the pair is rendered; the `tools` column is for human readers.
    """
    sides = [staged["prompt"], staged["chosen"], staged["rejected"]]
    if texts := staged.get("texts"):
        roles = ("user", "assistant", "assistant")
        sides = [[{"role": role, "content": text}] for role, text in zip(roles, texts, strict=True)]
    scores = [{} if staged.get(key) is None else {"reward": staged[key]} for key in _SCORES]
    completions = [
        {"rank": rank, "completion": side, **score}
        for rank, (side, score) in enumerate(zip(sides[1:], scores, strict=True))
    ]
    record = {"context": sides[0], "completions": completions}
    tools = {} if staged.get("texts") else {"tools": _tools(staged)}
    return record | tools | {key: staged[key] for key in LABELS}


def genrm_line(staged: Mapping[str, Any]) -> JsonObject:
    """Return the record of a reward model sample: the `genrm_record` in its line, and its source, task and language."""
    return {**staged["genrm"], **{key: staged[key] for key in ("source", "task", "language")}}


class Columns:
    """Union of the keys of all records in a file.

    Call `see` on every record. Write the records for which it returns True first, and pass every record through
    `filled`.
    """

    def __init__(self) -> None:
        self._shape: Any = None
        self._known: set[str] = set()

    def see(self, record: JsonObject) -> bool:
        """Add a record's keys; return True if a key is new, or has a value other than null for the first time."""
        paths = set(_paths(record, ""))
        new = not paths <= self._known
        if new:
            self._known |= paths
            self._shape = _joined(self._shape, _shape(record))
        return new

    def filled(self, record: JsonObject) -> JsonObject:
        """Return the record with null for each key that only other records have."""
        filled: JsonObject = _filled(record, self._shape)
        return filled


def _tools(staged: Mapping[str, Any]) -> str | None:
    return json.dumps(staged["tools"], ensure_ascii=False) if staged["tools"] else None


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield f"{path}."
        for key, item in value.items():
            yield from _paths(item, f"{path}.{key}")
    elif isinstance(value, list):
        yield f"{path}[]"
        for item in value:
            yield from _paths(item, f"{path}[]")
    elif value is not None:
        yield path
    else:
        yield f"{path}?"  # the key exists, but its type is unknown


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if key in _OPEN else _shape(item) for key, item in value.items()}
    if isinstance(value, list):
        shape: Any = None
        for item in value:
            shape = _joined(shape, _shape(item))
        return [shape]
    return None


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _joined(one.get(key), other.get(key)) for key in one | other}
    if isinstance(one, list) and isinstance(other, list):
        return [_joined(one[0], other[0])]
    return one if other is None else other


def _filled(value: Any, shape: Any) -> Any:
    if isinstance(value, dict) and isinstance(shape, dict):
        return {key: _filled(value.get(key), inner) for key, inner in shape.items()}
    if isinstance(value, list) and isinstance(shape, list):
        return [_filled(item, shape[0]) for item in value]
    return value
