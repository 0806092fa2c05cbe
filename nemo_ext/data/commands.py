"""The `nemo-ext` commands that create and inspect data, such as `tokenize`, `curate` and `blend`."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.job import Array, Config, Grammar, Input, Job, inputs, reads, will_exist
from nemo_ext.job.settings import Extra, Open, Place, Places, strings

DATA = {"directory": Place, "tokenizer": {"path": Place}, "packed": {"train": Places, "valid": Places}}
"""Types of the keys in a config's `data` section."""
TEXT = {"input": Places, "output": Place, "tokenizer": Place, "data_root": Place, "data": DATA}
"""Types of the keys shared by jobs that read text."""


def _files(*keys: str) -> Any:
    """Return a function from a config to its missing inputs: paths and globs under `keys` that match no file yet."""

    def missing(config: Config) -> list[Input]:
        words = [(key, word) for key in keys for word in strings(config.get(key))]
        return inputs(*((key, word, "name a file") for key, word in words if not glob.glob(os.path.expanduser(word))))

    return missing


def _tokenized(config: Config) -> Sequence[Any]:
    """Return the prefixes of the files that `nemo-ext tokenize` writes."""
    if config["output"]:
        return [config["output"]]
    from nemo_ext.data.blends.hierarchy import read_tree

    data = config["data"]
    leaves = read_tree(data).leaves() if data["blend"] or data["streams"] else []
    return [leaf.prefix for leaf in leaves if leaf.source is not None]


def _tokenizers_record(config: Config) -> Sequence[Any]:
    directory = None if config["output"] else config["data"]["directory"]
    return [directory] if directory else [os.path.expanduser(str(place)) for place in _tokenized(config)]


def _tokenize(config: Config) -> None:
    from nemo_ext.data.streams import blend_to_tokenize
    from nemo_ext.data.tokenize import tokenize_blend

    key = "data.tokenizer" if config["tokenizer"] is None else "tokenizer"
    tokenize_blend(blend_to_tokenize(config), tokenizer_key=key)


TOKENIZE = Job(
    name="tokenize",
    group="data",
    help="turn text, JSONL, Parquet or source trees into Megatron's .bin/.idx",
    run=_tokenize,
    resumable=True,
    check=reads("nemo_ext.data.streams:blend_to_tokenize"),
    inputs=_files("input"),
    outputs=_tokenized,
    record=_tokenizers_record,
    script="task",
    grammar=Grammar(
        settings=(TEXT, "nemo_ext.data.streams:TextSettings"),
        streams=True,
        advice={
            "max_bad_share": "it belongs to a source: in place of input=FILE output=DIR/NAME set data.directory=DIR "
            "and 'data.streams=[{name: NAME, weight: 1, source: {kind: jsonl, path: FILE, max_bad_share: 0.05}}]'"
        },
    ),
)

BYTE_TOKENIZER = Job(
    name="byte_tokenizer",
    group="data",
    help="write the byte tokenizer as a Hugging Face folder, with a chat template",
    run="nemo_ext.data.text.byte_tokenizer:run",
    script="task",
    grammar=Grammar(settings={"output": Place, "template": Place}),
)


def _passes(config: Config) -> int:
    """Return the number of curation passes; each pass needs the whole output of the previous one."""
    from nemo_ext.data.curation.passes import passes_of
    from nemo_ext.data.curation.settings import read_plan

    plan = read_plan(config)
    return 1 if plan.settings.engine else len(passes_of(plan.stages))


CURATE = Job(
    name="curate",
    group="data",
    help="filter and deduplicate raw documents in configurable stages, and count every dropped document",
    run="nemo_ext.data.curation.job:run",
    resumable=True,
    check=reads("nemo_ext.data.curation.job:check", files="files"),
    inputs=_files("input"),
    script="task",
    array=Array(key="shard", words=("shard={number}/{count}",), rounds=_passes),
    grammar=Grammar(
        settings=(
            TEXT,
            "nemo_ext.data.curation.settings:Settings",
            {
                "curate": (
                    "nemo_ext.data.curation.settings:Curate",
                    {"blocks": {"*": "nemo_ext.data.curation.settings:KINDS"}},
                )
            },
        ),
        groups={"preset": "curate"},
        streams=True,
        dry_run="dry_run",
    ),
)


CURATE_CLASSIFIER = Job(
    name="curate_classifier",
    group="data",
    help="train a quality classifier for curation on two sets of documents",
    run="nemo_ext.data.curation.training:run",
    check=reads("nemo_ext.data.curation.training:check"),
    inputs=_files("positives", "negatives"),
    script="task",
    grammar=Grammar(settings="nemo_ext.data.curation.training:Settings"),
)


def _text_and_tokenizers(config: Config) -> list[Input]:
    compared = [("compare", place, "name a tokenizer's folder") for place in strings(config["compare"])]
    return [*_files("input")(config), *inputs(*compared)]


TRAIN_TOKENIZER = Job(
    name="train_tokenizer",
    group="data",
    help="train a byte-level BPE tokenizer on text, and compare it with others in a report",
    run="nemo_ext.data.vocabulary.job:run",
    check=reads("nemo_ext.data.vocabulary.job:check"),
    inputs=_text_and_tokenizers,
    script="task",
    grammar=Grammar(
        settings=(TEXT, "nemo_ext.data.vocabulary.settings:Settings"),
        groups={"preset": "train_tokenizer"},
        streams=True,
    ),
)


SFT_DATA = Job(
    name="sft_data",
    group="data",
    help="turn conversations into packed sequences with loss masks: filters, chat templates, reasoning",
    run="nemo_ext.data.sft.job:run",
    resumable=True,
    check=reads("nemo_ext.data.sft.settings:read_settings"),
    script="task",
    grammar=Grammar(
        settings=(
            "nemo_ext.data.sft.settings:SftSettings",
            {"data_root": Place, "tokenizer": Place, "filters": {"*": "nemo_ext.data.sft.filters.screen:FILTERS"}},
        ),
        groups={"preset": "sft_data"},
    ),
)


def _check_preference_data(config: Config, coming: Sequence[Path]) -> None:
    from nemo_ext.data.preference.settings import settings

    tokenizer = config["tokenizer"]
    named = [tokenizer.get("path") if isinstance(tokenizer, dict) else None, config["template"]]
    files = [Path(str(name)).expanduser() for name in named if name]
    settings(config, files=all(path.exists() or not will_exist(path, coming) for path in files))


PREFERENCE_DATA = Job(
    name="preference_data",
    group="data",
    help="turn generations into DPO pairs and reward model samples, for TRL and NeMo-RL",
    run="nemo_ext.data.preference.job:run",
    resumable=True,
    check=_check_preference_data,
    script="task",
    grammar=Grammar(
        settings=(
            "nemo_ext.data.preference.settings:Settings",
            {"tokenizer": Place, "sources": ({"*": "nemo_ext.data.preference.settings:SourceSettings"}, Extra)},
        ),
        groups={"preset": "preference_data"},
    ),
)

BLEND = Job(
    name="blend",
    group="data",
    help="show shares, epochs and warnings for each stream of a blend; write files for trainers",
    run="nemo_ext.data.blends.job:audit",
    script="task",
    grammar=Grammar(
        settings=({**TEXT, "megatron": Open}, "nemo_ext.data.blends.job:Settings"), streams=True, added=("data",)
    ),
)


CURRICULUM = Job(
    name="curriculum",
    group="reinforcement learning",
    help="order RL prompts from easy to hard, by measured pass rates",
    run="nemo_ext.data.curriculum.job:run",
    check=reads("nemo_ext.data.curriculum.settings:settings"),
    script="task",
    grammar=Grammar(settings="nemo_ext.data.curriculum.settings:Settings"),
)
