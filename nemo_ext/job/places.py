"""Keys of jobs whose values name files or folders, from the types of the settings that read them. No torch."""

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from nemo_ext.job.settings import PLACE, Place, Places

# Sections by key, and their types: a mapping, the class that reads them ("module:name", imported when a key leads
# there), or a tuple of several. "*" is a name of the user's. Mappings stand where no class reads the section.
_MEGATRON = {
    **dict.fromkeys(("pretrained_checkpoint", "data_cache_path", "data_args_path", "per_split_data_args_path"), Place),
    **dict.fromkeys(("per_dataset_sequences_path", "object_storage_cache_path", "metadata_path"), Place),
    **dict.fromkeys(("tokenizer_model", "vocab_file", "merge_file", "chat_template"), Place),
    **dict.fromkeys(("logits_save_dir", "logits_load_dir", "wandb_save_dir", "rl_profile_dir"), Place),
    **dict.fromkeys(("config_logger_dir", "memory_snapshot_path", "moe_routing_trace_path"), Place),
    **dict.fromkeys(("flight_recorder_dump_path", "te_precision_config_file", "tp_comm_overlap_cfg"), Place),
    **dict.fromkeys(("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"), Place),
    **dict.fromkeys(("titles_data_path", "evidence_data_path", "block_data_path", "embedding_path"), Place),
    **dict.fromkeys(("nccl_communicator_config_path", "heterogeneous_layers_config_path"), Place),
    **dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path"), Places),
}
_DATA = {"directory": Place, "tokenizer": {"path": Place}, "packed": {"train": Places, "valid": Places}}
_FOLDERS = {"run_dir": Place, "data_root": Place}
_EVALUATE = ("nemo_ext.evaluation.settings:EvaluateSettings", {"judge": "nemo_ext.rl.judge:JudgeSettings"})
_TRAINING = {
    **_FOLDERS,
    "data": _DATA,
    "megatron": _MEGATRON,
    "phases": {"*": {"data": _DATA, "megatron": _MEGATRON}},
    "distillation": {"teacher": Place},
    "evaluate": (*_EVALUATE, "nemo_ext.evaluation.live:LiveSettings"),
    "cluster": "nemo_ext.slurm.cluster:Cluster",
}
_PUZZLE = _TRAINING | {"puzzle": ("nemo_ext.puzzle.settings:Settings", {"heal": {"megatron": _MEGATRON}})}
_TEXT = {"input": Places, "output": Place, "tokenizer": Place, "data_root": Place, "data": _DATA}
_SERVED = {"run_dir": Place, "served": Place, "files_from": Place, "endpoint": Place}
_ASKED = {"evaluate": _EVALUATE}
_ENVIRONMENTS = {"*": {"settings": {"judge": "nemo_ext.rl.judge:JudgeSettings"}}}
_RL = {
    **{"run_dir": Place, "policy": Place, "template": Place},
    "tasks": {"*": dict.fromkeys(("path", "curriculum", "directory"), Place)},
    "pairs": {"train": Place, "validation": Place},
    "rl": (
        "nemo_ext.rl.algorithms:PolicyGradient",
        {"environments": _ENVIRONMENTS, "group": _ENVIRONMENTS["*"]["settings"]},
    ),
    "environments": _ENVIRONMENTS,
}
SECTIONS: Mapping[str, Any] = {
    "blend": _TEXT,
    "byte_tokenizer": {"output": Place, "template": Place},
    "compare": "nemo_ext.evaluation.compare:CompareSettings",
    "convert": {
        **dict.fromkeys(("from", "to", "files_from", "tokenizer", "old_tokenizer"), Place),
        "parity": {"data": Place},
    },
    "curate": (
        _TEXT,
        "nemo_ext.data.curation.settings:Settings",
        {
            "curate": (
                "nemo_ext.data.curation.settings:Curate",
                {"blocks": {"*": "nemo_ext.data.curation.settings:KINDS"}},
            )
        },
    ),
    "curate_classifier": "nemo_ext.data.curation.training:Settings",
    "curriculum": "nemo_ext.data.curriculum.settings:Settings",
    "describe": _TRAINING | {"draw": Place},
    "evaluate": ("nemo_ext.evaluation.job:Given", _SERVED, _ASKED),
    "fetch": {"to": Place, "wheel": Place},
    "generate": "nemo_ext.generate.job:Given",
    "gym": {"output": Place, "tasks": Places},
    "merge": {"from": Places, "to": Place},
    "merge_sweep": (_SERVED, _ASKED, {"from": Places}),
    "mixture": "nemo_ext.mixture.settings:Settings",
    "online": (
        _SERVED,
        _RL,
        _ASKED,
        {"online": {"environments": _ENVIRONMENTS, "group": "nemo_ext.rl.algorithms:GroupReward"}},
    ),
    "pipeline": _FOLDERS,
    "preference_data": (
        "nemo_ext.data.preference.settings:Settings",
        {"tokenizer": Place, "sources": {"*": "nemo_ext.data.preference.settings:SourceSettings"}},
    ),
    "puzzle": _PUZZLE,
    "quantize": {
        **{"from": Place, "to": Place, "files_from": Place},
        "calibration": {"data": Place, "template": Place},
    },
    "rehearse": _TRAINING,
    "rehearse_puzzle": _PUZZLE,
    "rl": _RL,
    "rl_tasks": {"records": Places, "without": Places, "output": Place, "solutions": Place},
    "rollouts": (
        _SERVED,
        _ASKED,
        {"rollouts": ("nemo_ext.evaluation.rollouts:RolloutSettings", {"environments": _ENVIRONMENTS})},
    ),
    "sensitivity": _TRAINING | {"sensitivity": "nemo_ext.sensitivity.settings:Settings"},
    "serve": _SERVED,
    "sft_data": (
        "nemo_ext.data.sft.settings:SftSettings",
        {"data_root": Place, "tokenizer": Place, "filters": {"*": "nemo_ext.data.sft.filters.screen:FILTERS"}},
    ),
    "slurm": {"slurm": "nemo_ext.slurm.settings:Keeping", "cluster": "nemo_ext.slurm.cluster:Cluster"},
    "synthesize": ("nemo_ext.synthesis.job:Given", {"roles": {"*": "nemo_ext.synthesis.settings:Role"}}),
    "tokenize": _TEXT,
    "train": _TRAINING,
    "train_tokenizer": (_TEXT, "nemo_ext.data.vocabulary.settings:Settings"),
}
"""Types of the keys of each job that may name files or folders, by its config's name."""


def is_place(job: str, key: str) -> bool:
    """Whether the value of a job's key names a file or folder, or a list of them."""
    return _leads(SECTIONS.get(job, {}), key.split("."))


def _leads(kind: Any, parts: list[str]) -> bool:
    """Whether a key, part by part, leads from a type to one that is marked as a place."""
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(module), name)
        kind = tuple(kind.values()) if isinstance(kind, Mapping) else kind  # kinds by name
    if isinstance(kind, tuple):
        return any(_leads(each, parts) for each in kind)
    if not parts:
        return kind is Path or PLACE in getattr(kind, "__metadata__", ()) or any(_leads(each, []) for each in _of(kind))
    if isinstance(kind, Mapping):
        return any(_leads(kind[name], parts[1:]) for name in (parts[0], "*") if name in kind)
    if dataclasses.is_dataclass(kind):
        names = {each.name for each in dataclasses.fields(kind)}
        return parts[0] in names and _leads(get_type_hints(kind, include_extras=True)[parts[0]], parts[1:])
    if get_origin(kind) in (dict, Mapping):
        return _leads(get_args(kind)[1], parts[1:])
    return any(_leads(each, parts) for each in _of(kind))


def _of(kind: Any) -> tuple[Any, ...]:
    """Types that a union, a tuple or an annotated type is of."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return get_args(kind)
    return (get_args(kind)[0],) if get_origin(kind) is Annotated else ()
