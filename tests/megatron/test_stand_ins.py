"""Transformer Engine and apex replaced by modules with their names, as neither runs without a GPU."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # two more processes that import Megatron

PROGRAM = """
import importlib, importlib.abc, importlib.machinery, importlib.metadata, sys
from nemo_ext.megatron.cpu import runtime

class Engines(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    '''Modules of an engine; every attribute that is asked for is a module's class of that name.'''
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ENGINES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        import torch
        module.__version__ = "2.9.0"
        def made(attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            if attribute.islower():
                return importlib.import_module(f"{module.__name__}.{attribute}")
            found = type(attribute, (torch.nn.Module,), {"__module__": module.__name__})
            setattr(module, attribute, found)
            return found
        module.__getattr__ = made

ENGINES = sys.argv[1].split(",")
version = importlib.metadata.version
importlib.metadata.version = lambda name: "2.9.0" if name.replace("-", "_") in ENGINES else version(name)
import torch
sys.meta_path.insert(0, Engines())
runtime.enable()
"""


def ran(engines: str, code: str, *words: str) -> list[str]:
    """Lines printed by code in a process in which these engines can be imported."""
    command = [sys.executable, "-c", PROGRAM + code, engines, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout.splitlines()


BACKEND = """
from types import SimpleNamespace
from nemo_ext.megatron.specs import StackOptions, stack_submodules
config = SimpleNamespace(
    transformer_impl=sys.argv[2], normalization="RMSNorm", qk_layernorm=True, num_moe_experts=4, moe_grouped_gemm=True
)
parts = stack_submodules(config, StackOptions())
attention, mamba = parts.attention_layer.submodules.self_attention.submodules, parts.mamba_layer.submodules
experts = parts.moe_layer.submodules.mlp.keywords["submodules"].experts
norm = getattr(attention.q_layernorm, "args", [attention.q_layernorm])[0]  # Transformer Engine's is wrapped
for each in (attention.linear_qkv, attention.core_attention, norm, mamba.mixer.submodules.out_proj):
    print(each.__module__.rpartition(".")[2], each.__name__, each.__mro__[1].__module__)
print(experts)
import megatron.core.optimizer as optimizer, megatron.core.optimizer.clip_grads as clipping
print(optimizer.Adam.__module__, clipping.multi_tensor_applier.__name__)
"""


def test_blocks_are_made_of_transformer_engine() -> None:
    *modules, experts, optimizer = ran("transformer_engine", BACKEND, "transformer_engine")

    assert modules == [
        "transformer_engine TELayerNormColumnParallelLinear transformer_engine.pytorch",
        "transformer_engine TEDotProductAttention transformer_engine.pytorch",
        "transformer_engine TENorm builtins",
        "transformer_engine TERowParallelLinear megatron.core.extensions.transformer_engine",
    ]
    assert "TEGroupedMLP" in experts and "TEColumnParallelGroupedLinear" in experts
    assert optimizer.startswith("transformer_engine.pytorch.optimizers ")


def test_apex_is_used_only_for_the_optimizer() -> None:
    """Its norms refuse sequence parallelism without weights and zero-centred norms, so blocks keep ours."""
    *modules, _, optimizer = ran("apex,amp_C", BACKEND, "local")

    assert [module.split()[0] for module in modules] == ["layers", "attention", "norms", "layers"]
    assert optimizer == "apex.optimizers apex.multi_tensor_apply.multi_tensor_applier"
