"""Every row of the patch table is still needed, and the table undoes itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_ext.megatron.cpu import patches

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the table is for machines without CUDA"),
    pytest.mark.xdist_group(name="patches"),
]

TARGETS = [target for patch in patches.PATCHES for target in patch.targets]


@pytest.fixture(scope="module")
def errors() -> dict[str, str | None]:
    """What training without each target fails with (`train_without.py`)."""
    script = Path(__file__).with_name("train_without.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.deep
@pytest.mark.parametrize("target", TARGETS)
def test_training_fails_without_it(errors: dict[str, str | None], target: str) -> None:
    assert errors[target], f"{target} is no longer needed: remove it from the table"


@pytest.mark.slow
def test_applying_twice_changes_nothing_restoring_puts_all_back_and_nothing_is_compiled() -> None:
    """In a process of its own: other tests here run with the table applied, and ModelOpt brings the compiler."""
    code = """
import sys
import torch
sys.modules["modelopt"] = None
from nemo_ext.megatron.cpu import patches, runtime
original, compiling = torch.cuda.current_device, torch.compile
runtime.enable()
patched = torch.cuda.current_device
with patches.applied():
    patches.apply()
assert torch.cuda.current_device is patched is not original
patches.restore()
assert torch.cuda.current_device is original

from megatron.core.fusions.fused_bias_swiglu import swiglu
assert torch.compile is compiling
assert not hasattr(swiglu, "_torchdynamo_orig_callable")
assert "torch._inductor.compile_fx" not in sys.modules, "torch's compiler was imported"
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_an_unknown_row_is_named() -> None:
    with pytest.raises(ValueError, match="unknown patches"):
        patches.apply(without=["nothing"])
