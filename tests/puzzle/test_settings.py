"""Validation of the `puzzle:` section."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.puzzle.choice.problem import Limit
from nemo_ext.puzzle.settings import Settings, limit, settings

SEARCH = {"shares": {"parameters": 0.6}}


def test_the_packaged_config_is_complete() -> None:
    chosen = settings(compose("puzzle", ["recipe=puzzle/quickstart"])["puzzle"])
    assert chosen.search.shares["memory_bytes"] == 0.6
    assert chosen.variants.ffn == (0.87, 0.75, 0.5, 0.25, 0.1)
    assert chosen.heal.tokens > 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "puzzle: the key 'search' is missing"),
        ({"search": {}}, "neither shares nor limits"),
        ({"search": SEARCH, "distil": {}}, "puzzle: unknown key 'distil': did you mean 'distill'"),
        ({"search": SEARCH, "distill": {"stepz": 1}}, r"puzzle: unknown key 'distill\.stepz': did you mean 'steps'"),
        ({"search": SEARCH, "distill": {"steps": "10"}}, r"puzzle\.distill\.steps='10'"),
        ({"search": SEARCH, "distill": {"steps": True}}, r"puzzle\.distill\.steps=True"),
        ({"search": SEARCH, "distill": {"lr": 0}}, r"puzzle\.distill\.lr=0: .*greater than 0"),
        ({"search": SEARCH, "variants": {"ffn": [2]}}, r"puzzle\.variants\.ffn\.0=2"),
        ({"search": SEARCH, "serving": {"batch": 0}}, r"puzzle\.serving\.batch=0"),
        (
            {"search": {"shares": {"paremeters": 1}}},
            r"puzzle\.search\.shares: .*'paremeters'; did you mean 'parameters'",
        ),
        ({"search": {"shares": {"throughput": 1}}}, r"puzzle\.search\.shares: .*'throughput'"),
        ({"search": {"limits": {"parameters": "many"}}}, r"puzzle\.search\.limits\.parameters\.upper='many'"),
        (
            {"search": {"limits": {"parameters": {"most": 1}}}},
            r"limits\.parameters: unknown key 'most': .*known: lower, upper",
        ),
        ({"search": {"limits": {"parameters": {}}}}, "expected a number, or"),
        ({"search": {"limits": {"throughput": {"upper": 3}}}}, "supports only a lower bound"),
        ({"search": {"shares": {"parameters": {"lower": 2, "upper": 1}}}}, "lower=2 must not be above upper=1"),
        ({"search": {**SEARCH, "gap": 1.5}}, r"puzzle\.search\.gap=1\.5"),
        ({"search": SEARCH, "serving": {"precision": "int3"}}, r"puzzle\.serving\.precision='int3'"),
        ({"search": SEARCH, "fuse": {"max_blocks": 1}}, r"puzzle\.fuse\.max_blocks=1"),
        ({"search": SEARCH, "heal": {"kl_weight": 0}}, r"puzzle\.heal\.kl_weight=0"),
        ({"search": SEARCH, "variants": {"windows": [-5]}}, r"puzzle\.variants\.windows\.0=-5"),
        ({"search": {**SEARCH, "metric": "bleu"}}, r"puzzle\.search\.metric='bleu'"),
        ({"search": {**SEARCH, "sweep": {"resource": "speed"}}}, r"puzzle\.search\.sweep\.resource"),
        ({"search": SEARCH, "heal": {"teacher": "cached"}}, r"puzzle\.heal\.top_k=64"),
        ({"search": SEARCH, "child": "a/b"}, r"puzzle.child='a/b'"),
    ],
)
def test_invalid_values_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(section)


def test_defaults_match_the_packaged_file() -> None:
    written = yaml.safe_load((Path(hydra_conf.__file__).parent / "compression.yaml").read_text())["puzzle"]
    own = json.loads(TypeAdapter(Settings).dump_json(settings({"search": SEARCH})))
    assert written["serving"].pop("flops") and own["serving"].pop("flops") == 494.5e12
    assert written["serving"].pop("bandwidth") and own["serving"].pop("bandwidth") == pytest.approx(2.345e12)
    own["search"]["shares"] = {}
    assert written == own


def test_a_number_is_an_upper_bound_but_for_a_throughput() -> None:
    assert limit("x", 5) == Limit(upper=5)
    assert limit("x", 5, at_least=True) == Limit(lower=5)
    assert limit("x", {"lower": 1, "upper": 2}) == Limit(upper=2, lower=1)
