"""Packs that Transformer Engine's attention does not support; sources are in the module."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from packaging.version import Version

from nemo_ext.job.config import compose
from nemo_ext.megatron import packed_attention, versions

PHASES = {"phases": {"a": {"tokens": 1.0}, "b": {"tokens": 1.0, "data": {"packed": {"train": "p", "valid": None}}}}}
OLMO, DOMYN = "olmo3/32b_think_sft", "domyn_small/sft"


A100, H100 = (8, 0), (9, 0)


def lack(
    recipe: str,
    *words: str,
    gpu: tuple[int, int] | None = H100,
    flash: bool = False,
    version: str = "2.20.2",
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    config = {**compose("train", [f"recipe={recipe}", "run_dir=unused", *words]), **changes}
    return packed_attention.lack(config, "an A100", capability=gpu, flash=flash, version=Version(version))


@pytest.mark.parametrize(
    ("recipe", "words", "facts", "said"),
    [
        (DOMYN, [], {"gpu": A100}, "attention_backend=auto have no attention kernel on an A100"),
        (DOMYN, [], {"gpu": A100, "flash": True}, None),
        (DOMYN, [], {"gpu": (7, 0), "flash": True}, "no attention kernel"),
        (DOMYN, [], {"gpu": None}, None),
        (DOMYN, ["megatron.attention_backend=fused"], {"gpu": A100, "flash": True}, "attention_backend=fused have no"),
        (DOMYN, ["megatron.attention_backend=flash"], {}, "attention_backend=flash have no attention kernel"),
        (DOMYN, ["megatron.attention_backend=unfused"], {"gpu": None}, "set auto, fused or flash"),
        (DOMYN, ["megatron.cp_comm_type=a2a+p2p"], {}, "set p2p or a2a"),
        (DOMYN, ["data=mock"], {"gpu": A100, "changes": PHASES}, "no attention kernel"),
        (DOMYN, ["data=mock", "megatron.context_parallel_size=1"], {"gpu": A100, "changes": PHASES}, None),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.18.0.dev0+5bd0b0f"}, None),
        (DOMYN, ["megatron.context_parallel_size=1"], {"gpu": A100}, None),
        (DOMYN, [], {"version": "2.8.0+40b1f3d"}, None),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.17.1"}, "2.18 does: set megatron.cp_comm_type=a2a"),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.9"}, "2.18 does: install a newer version"),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.18"}, None),
        (
            OLMO,
            ["megatron.cp_comm_type=a2a"],
            {"version": "2.9"},
            "Transformer Engine 2.9 does not support packs with megatron.context_parallel_size=",
        ),
        (OLMO, ["megatron.cp_comm_type=a2a"], {"version": "2.10"}, None),
        (OLMO, ["data=mock"], {"version": "2.9", "gpu": A100}, None),
    ],
)
def test_packs_that_attention_does_not_support(
    recipe: str, words: list[str], facts: dict[str, Any], said: str | None
) -> None:
    why = lack(recipe, *words, **facts)

    assert why is None if said is None else why is not None and said in why


@pytest.mark.parametrize("recipe", ["olmo3/7b_think_sft", OLMO])
def test_recipes_on_packs_avoid_features_of_new_engines(recipe: str) -> None:
    assert lack(recipe, version="2.10") is None


def test_yarn_over_packs_is_slow_before_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(recipe: str, *version: int) -> bool:
        monkeypatch.setattr(versions, "installed", lambda: version)
        return packed_attention.remark(compose("train", [f"recipe={recipe}", "run_dir=unused"])) is not None

    assert told(OLMO, 0, 19, 2) and not told(OLMO, 0, 20, 0)
    assert not told(DOMYN, 0, 19, 2) and not told("olmo3/32b_long_context", 0, 19, 2)
