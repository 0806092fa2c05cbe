"""What vLLM is told of a plan."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.architecture.precision_plan import RECIPES, Plan, Rule
from nemo_ext.quantization.generation import (
    ONLINE,
    cli_words,
    high_modules,
    online_arguments,
    serve_words,
    vllm_arguments,
)
from nemo_ext.quantization.modelopt import matrices

SELECTIVE = tuple(map(Rule.parse, ("* bf16", "M>* bf16", "E.fc1 bf16", "E.fc2 bf16", "head bf16")))


def test_a_checkpoint_says_all_but_the_cache() -> None:
    assert vllm_arguments(Plan(default="fp8")) == {}
    assert vllm_arguments(Plan(default="fp8", kv_cache="fp8")) == {"kv_cache_dtype": "fp8"}
    words = serve_words(Path("exports/my model"), Plan(default="fp8", kv_cache="fp8"))
    assert shlex.split(" ".join(words)) == ["vllm", "serve", "exports/my model", "--kv-cache-dtype", "fp8"]


def test_vllm_quantises_what_the_plan_has_in_fp8(described: Callable[..., Any]) -> None:
    description, found, _ = described("nemotron3_nano_tiny", "MEM*-")
    plan = Plan(default="fp8", recipe="blockwise", rules=SELECTIVE)
    listed = matrices(plan, description, found)

    arguments = online_arguments(plan, listed)

    assert arguments["quantization"] == "fp8_per_block"
    patterns = [word.removeprefix("re:") for word in arguments["quantization_config"]["ignore"]]
    linear = [matrix for matrix in listed if matrix.weight.part not in ("embedding", "head", "conv1d", "router")]
    for matrix in linear:
        # As vLLM calls it: `model` in the place of `backbone`, a block's experts as one module.
        name = re.sub(r"\.experts\..*", ".experts", matrix.module).replace("backbone.", "model.")
        assert any(re.match(pattern, name) for pattern in patterns) == (matrix.precision != "fp8"), name
    assert not any(re.match(pattern, "model.layers.12.mixer.in_proj") for pattern in patterns)
    assert high_modules(listed) == [
        "layers.1.mixer.experts",
        "layers.2.mixer.in_proj",
        "layers.2.mixer.out_proj",
        *(f"layers.3.mixer.{name}_proj" for name in "qkvo"),
    ]
    assert set(ONLINE) == set(RECIPES)


def test_keywords_are_words_of_the_command_line() -> None:
    words = cli_words({"kv_cache_dtype": "fp8", "quantization_config": {"ignore": ["re:.*a$"]}})

    assert words[:2] == ["--kv-cache-dtype", "fp8"]
    assert words[2] == "--quantization-config" and json.loads(words[3]) == {"ignore": ["re:.*a$"]}


def test_an_output_layer_in_fp8_is_refused(described: Callable[..., Any]) -> None:
    description, found, _ = described("domyn_small_tiny", "*-")
    plan = Plan(default="fp8")

    with pytest.raises(ValueError, match="head bf16"):
        online_arguments(plan, matrices(plan, description, found))


def test_a_plan_for_the_cache_alone(described: Callable[..., Any]) -> None:
    description, found, _ = described("domyn_small_tiny", "*-")
    plan = Plan(default="bf16", kv_cache="fp8")

    assert online_arguments(plan, matrices(plan, description, found)) == {"kv_cache_dtype": "fp8"}
