"""Which packs Transformer Engine cannot attend over; sources in the module."""

import pytest
from packaging.version import Version

from nemo_ext.job.config import compose
from nemo_ext.megatron import packed_attention, versions

OLMO, DOMYN = "olmo3/32b_think_sft", "domyn_small/sft"


def lack(recipe: str, *words: str, fused: bool = True, flash: bool = False, version: str = "2.20.2") -> str | None:
    config = compose("train", [f"recipe={recipe}", "run_dir=unused", *words])
    return packed_attention.lack(config, "an A100", fused=fused, flash=flash, version=Version(version))


@pytest.mark.parametrize(
    ("recipe", "words", "facts", "said"),
    [
        (DOMYN, [], {"fused": False}, "packs with megatron.context_parallel_size=4 on an A100: "),
        (DOMYN, [], {"fused": False, "flash": True}, None),
        (DOMYN, ["megatron.context_parallel_size=1"], {"fused": False}, None),
        (DOMYN, [], {"version": "2.8.0+40b1f3d"}, None),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.17.1"}, "2.18 does: set megatron.cp_comm_type=a2a"),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.9"}, "2.18 does: install a newer one"),
        (OLMO, ["megatron.cp_comm_type=all_gather"], {"version": "2.18"}, None),
        (OLMO, ["megatron.cp_comm_type=a2a"], {"version": "2.9"}, "cp_comm_type=a2a: Transformer Engine 2.9 does not"),
        (OLMO, ["megatron.cp_comm_type=a2a"], {"version": "2.10"}, None),
        (OLMO, ["data=mock"], {"version": "2.9", "fused": False}, None),
    ],
)
def test_packs_that_cannot_be_attended_over(
    recipe: str, words: list[str], facts: dict[str, object], said: str | None
) -> None:
    why = lack(recipe, *words, **facts)

    assert why is None if said is None else why is not None and said in why


@pytest.mark.parametrize("recipe", ["olmo3/7b_think_sft", OLMO])
def test_recipes_on_packs_choose_what_older_engines_have(recipe: str) -> None:
    assert lack(recipe, version="2.10") is None


def test_yarn_over_packs_is_slow_before_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(recipe: str, *version: int) -> bool:
        monkeypatch.setattr(versions, "installed", lambda: version)
        return packed_attention.remark(compose("train", [f"recipe={recipe}", "run_dir=unused"])) is not None

    assert told(OLMO, 0, 19, 2) and not told(OLMO, 0, 20, 0)
    assert not told(DOMYN, 0, 19, 2) and not told("olmo3/32b_long_context", 0, 19, 2)
