"""Parts of gpu.py; each gives tables of alternately measured sides."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import Machine, Step, Table, compare, made_at_first, training_step
from torch import Tensor

from nemo_ext.megatron.float8 import E5M2, SCALINGS, float8_linear


@dataclass(frozen=True)
class Sizes:
    """Measured sizes; the defaults are those of trained models.

    Attributes:
        tokens: tokens of a training step.
        hidden: hidden size of Domyn-Small; also `ffn`, `qkv` (48 query and 2 x 8 key and value heads of 128) and
            `heads_width`.
        fusion_hidden: hidden size of Llama-Nemotron Ultra 253B, whose widest fused FFN on one of eight tensor-parallel
            ranks is `fusion_blocks` x `fusion_ffn`.
        length: tokens of a scan with the heads, states and groups of Nemotron 3 Nano.
        sequence: tokens of attention with Domyn-Small's query, key and value heads of `attention_dim`, also with a
            window of half the length, and packed as `packed` sequences.
        head_hidden: hidden size of OLMo 3 32B.
        head_rows: rows of its vocabulary on one of two ranks: as published, and padded to multiples of 32 and 64.
        rounds: number of measured rounds.
    """

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 16384
    qkv: int = 8192
    heads_width: int = 6144
    fusion_hidden: int = 16384
    fusion_ffn: int = 6240
    fusion_blocks: int = 8
    fusion_tokens: tuple[int, ...] = (1, 8, 32)
    length: int = 8192
    heads: int = 64
    head_dim: int = 64
    state: int = 128
    groups: int = 8
    sequence: int = 4096
    attention_heads: tuple[int, int] = (48, 8)
    attention_dim: int = 128
    packed: int = 8
    head_hidden: int = 5120
    head_rows: tuple[int, ...] = (50_139, 50_144, 50_176)
    rounds: int = 30


SMALL = Sizes(
    tokens=32,
    hidden=64,
    ffn=128,
    qkv=96,
    heads_width=48,
    fusion_hidden=64,
    fusion_ffn=32,
    fusion_blocks=3,
    length=256,
    heads=4,
    head_dim=16,
    state=16,
    groups=2,
    sequence=64,
    attention_heads=(4, 2),
    attention_dim=16,
    packed=4,
    head_hidden=64,
    head_rows=(255, 256, 320),
    rounds=3,
)


def fp8(sizes: Sizes, machine: Machine) -> Iterator[Table]:
    """Compare FP8 with BF16 for Domyn-Small's FFN and attention projections."""
    shapes = {
        f"FFN {sizes.hidden} -> {sizes.ffn} -> {sizes.hidden}, squared ReLU": [
            (sizes.hidden, sizes.ffn),
            (sizes.ffn, sizes.hidden),
        ],
        f"attention projections {sizes.hidden} -> {sizes.qkv}, {sizes.heads_width} -> {sizes.hidden}": [
            (sizes.hidden, sizes.qkv),
            (sizes.heads_width, sizes.hidden),
        ],
    }
    engine = machine.device != "cpu" and importlib.util.find_spec("transformer_engine") is not None
    for title, maps in shapes.items():
        table = Table(f"FP8 against BF16: {title}, {sizes.tokens} tokens, forward and backward")
        steps = engine_steps(maps, sizes, machine) if engine else torch_steps(maps, sizes, machine)
        if machine.device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
            steps = {name: step for name, step in steps.items() if name.startswith("BF16")}
            table.remarks.append("This GPU has no FP8, which needs compute capability 8.9 or later.")
        compare(table, steps, machine)
        table.remarks.append(
            "Transformer Engine's Linear."
            if engine
            else "Uses nemo_ext.megatron.float8 instead of Transformer Engine (no CUDA, or not installed)."
        )
        yield table


def chained(maps: list[tuple[int, int]], linears: list[Callable[[Tensor], Tensor]], x: Tensor, other: Tensor) -> Tensor:
    """An FFN if the second layer fits the output of the first, otherwise both layers on separate inputs."""
    first = linears[0](x)
    if maps[0][1] == maps[1][0]:
        return linears[1](torch.relu(first).square())
    return torch.cat([first, linears[1](other)], dim=-1)


def in_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """FP8 training without Transformer Engine: e4m3, gradients in e5m2."""
    return float8_linear(x, weight, SCALINGS["tensorwise"], gradients=E5M2)


def torch_steps(maps: list[tuple[int, int]], sizes: Sizes, machine: Machine) -> dict[str, Step]:
    x, other = (machine.random(sizes.tokens, width, grad=True) for width in (maps[0][0], maps[1][0]))
    weights = [(machine.random(out, into) / into**0.5).detach().requires_grad_() for into, out in maps]
    sides = {"BF16": F.linear, "FP8, per-tensor scale": in_fp8, "the same, compiled": torch.compile(in_fp8)}
    steps = {}
    for name, product in sides.items():
        linears = [lambda t, w=weight, p=product: p(t, w) for weight in weights]
        forward = lambda t, linears=linears: chained(maps, linears, t, other)  # noqa: E731
        steps[name] = made_at_first(partial(training_step, forward, x, [*weights, other]))
    return steps


def engine_steps(maps: list[tuple[int, int]], sizes: Sizes, machine: Machine) -> dict[str, Step]:
    """Steps of Transformer Engine's Linear with every scaling of the installed version."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    x, other = (machine.random(sizes.tokens, width, grad=True) for width in (maps[0][0], maps[1][0]))
    scalings = {
        "FP8, delayed scaling": "DelayedScaling",
        "FP8, current scaling": "Float8CurrentScaling",
        "FP8, blocks of 128": "Float8BlockScaling",
        "MXFP8": "MXFP8BlockScaling",
    }
    found = {name: getattr(recipe, kind)() for name, kind in scalings.items() if hasattr(recipe, kind)}
    steps: dict[str, Step] = {}
    for name, scaling in {"BF16": None, **found}.items():
        linears = [te.Linear(into, out, bias=False, params_dtype=torch.bfloat16).cuda() for into, out in maps]

        def step(linears: list[Any] = linears, scaling: Any = scaling) -> None:
            for tensor in (x, other, *(linear.weight for linear in linears)):
                tensor.grad = None
            with te.fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling):
                y = chained(maps, linears, x, other)
            y.backward(y.detach())

        steps[name] = step
    return steps


def ffn(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Tensors of a SwiGLU FFN with its norm, by the names in Megatron's checkpoint."""
    normed = F.rms_norm(x, x.shape[-1:], weights["linear_fc1.layer_norm_weight"], 1e-5)
    gate, up = F.linear(normed, weights["linear_fc1.weight"]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights["linear_fc2.weight"])


@torch.no_grad()
def ffn_fusion(sizes: Sizes, machine: Machine) -> Iterator[Table]:
    """Compare FFNs in sequence with the FFN into which `nemo_ext.puzzle.fusion.fusion` merges them."""
    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.job.config import compose
    from nemo_ext.puzzle.fusion.fusion import fuse_weights

    hidden, width, count = sizes.fusion_hidden, sizes.fusion_ffn, sizes.fusion_blocks
    parts = [
        {
            "linear_fc1.weight": machine.random(2 * width, hidden) / hidden**0.5,
            "linear_fc2.weight": machine.random(hidden, width) / width**0.5,
            "linear_fc1.layer_norm_weight": 1 + machine.random(hidden) / 10,
        }
        for _ in range(count)
    ]
    whole = fuse_weights(parts, from_config(compose("describe", ["model=llama_nemotron_ultra_253b"])))

    def one_after_the_other(x: Tensor) -> Tensor:
        for part in parts:
            x = x + ffn(x, part)
        return x

    for tokens in sizes.fusion_tokens:
        x = machine.random(tokens, hidden)
        beside = x + torch.stack([ffn(x, part) for part in parts]).float().sum(0)
        difference = ((x + ffn(x, whole) - beside).abs().max() / beside.abs().max()).item()
        if not difference < 0.03:  # a few BF16 rounding steps
            raise RuntimeError(f"the fused FFN differs from its parts by {difference:.1%} of the largest output")
        table = Table(f"{count} FFNs of width {width}, hidden {hidden}, SwiGLU, bf16, tokens: {tokens}, forward")
        steps = {
            "in sequence": lambda x=x: one_after_the_other(x),
            f"fused, width {count * width}": lambda x=x: x + ffn(x, whole),
        }
        compare(table, steps, machine)
        table.remarks.append(f"The fused FFN equals the parallel ones up to {difference:.1%} of the largest output.")
        yield table


def ssd(sizes: Sizes, machine: Machine) -> Iterator[Table]:
    """Compare the torch scan with mamba_ssm's."""
    from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan

    chunk, grouped = 128, (1, sizes.length, sizes.groups, sizes.state)
    x = machine.random(1, sizes.length, sizes.heads, sizes.head_dim, grad=True)
    dt = (torch.rand(1, sizes.length, sizes.heads, device=machine.device) * 0.1).requires_grad_()
    A = (-torch.linspace(1, 16, sizes.heads, device=machine.device)).requires_grad_()
    B, C = (machine.random(*grouped, grad=True) for _ in range(2))

    def torch_scan(x: Tensor) -> Any:
        return ssd_chunk_scan(x, dt, A, B, C, chunk_size=chunk)

    def triton_scan(x: Tensor) -> Any:
        if machine.device == "cpu":
            raise RuntimeError("mamba_ssm's kernels need a CUDA device")
        if importlib.util.find_spec("mamba_ssm") is None:
            raise RuntimeError("mamba_ssm is not installed")
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk)

    table = Table(
        f"Mamba-2 scan: {sizes.length} tokens, {sizes.heads} heads x {sizes.head_dim}, state {sizes.state}, "
        f"{sizes.groups} groups, bf16, forward and backward"
    )
    others: list[Tensor] = [dt, A, B, C]
    steps = {"torch (ours)": training_step(torch_scan, x, others)}
    steps["Triton (mamba_ssm)"] = made_at_first(lambda: training_step(triton_scan, x, others))
    compare(table, steps, machine)
    if table.rows[1][1] is not None:
        with torch.no_grad():
            one, other = torch_scan(x).float(), triton_scan(x).float()
        table.remarks.append(f"They differ by at most {((one - other).abs().max() / other.abs().max()).item():.1%}.")
    yield table


def attention(sizes: Sizes, machine: Machine) -> Iterator[Table]:
    """Compare Transformer Engine's attention kernels with torch's, including their outputs."""
    yield attention_table("causal", None, 1, sizes, machine)
    yield attention_table(f"window of {sizes.sequence // 2}", sizes.sequence // 2, 1, sizes, machine)
    yield attention_table(f"{sizes.packed} packed sequences", None, sizes.packed, sizes, machine)
    maps = Path("/proc/self/maps").read_text().split()
    libraries = sorted({path for path in maps if "libcudnn" in path})
    found = Table("Attention libraries")
    found.remarks = [f"cuDNN {torch.backends.cudnn.version()} of torch; loaded: {', '.join(libraries) or 'none'}."]
    flash = importlib.util.find_spec("flash_attn") is not None
    found.remarks.append(f"flash-attn is {'' if flash else 'not '}installed.")
    yield found


def attention_table(title: str, window: int | None, count: int, sizes: Sizes, machine: Machine) -> Table:
    """Table of the kernels for `count` sequences of equal length."""
    length, (heads, groups), width = sizes.sequence, sizes.attention_heads, sizes.attention_dim
    table = Table(
        f"Attention, {title}: {length} tokens, {heads} / {groups} heads x {width}, bf16, forward and backward"
    )
    q, k, v = (machine.random(length, each, width, grad=True) for each in (heads, groups, groups))
    reference = partial(torch_attention, k=k, v=v, mask=allowed(length, window, count, machine.device))
    compare(table, {"torch": made_at_first(partial(training_step, reference, q, [k, v]))}, machine)
    with torch.no_grad():
        expected = reference(q).float()

    def step(kernel: str, name: str) -> Step:
        forward = engine_attention(kernel, heads, k, v, window, count)
        off = (forward(q).detach().float() - expected).abs().max() / expected.abs().max()
        table.remarks.append(f"{name}: differs from torch's by {off.item():.2%} of the largest output.")
        return training_step(forward, q, [k, v])

    for kernel in ("FUSED", "FLASH", "UNFUSED"):  # in sequence, as the choice persists between calls
        name = f"Transformer Engine, {kernel.lower()}"
        compare(table, {name: made_at_first(partial(step, kernel, name))}, machine)
    return table


def allowed(length: int, window: int | None, count: int, device: str) -> Tensor:
    """Mask [length, length] of `count` causal sequences of equal length, True where attention is allowed."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    part = place // (length // count)
    mask = (back >= 0) & (part[:, None] == part)
    return mask if window is None else mask & (back < window)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over [tokens, heads, width]; the result is [tokens, heads * width]."""
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def engine_attention(
    kernel: str, heads: int, k: Tensor, v: Tensor, window: int | None, count: int
) -> Callable[[Tensor], Tensor]:
    """Attention by one of Transformer Engine's kernels: FUSED (cuDNN), FLASH or UNFUSED."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as chosen

    os.environ.update({f"NVTE_{name}_ATTN": str(int(name == kernel)) for name in ("FUSED", "FLASH", "UNFUSED")})
    chosen._attention_backends["backend_selection_requires_update"] = True
    length, groups, width = k.shape
    bounds = torch.arange(0, length + 1, length // count, dtype=torch.int32, device=k.device)
    span = (-1 if window is None else window - 1, 0)
    packs = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": length // count}
    packs |= {"max_seqlen_kv": length // count}
    shape, form, mask = ((length, 1), "sbhd", "causal") if count == 1 else ((length,), "thd", "padding_causal")

    module = te.DotProductAttention(
        heads, width, num_gqa_groups=groups, qkv_format=form, attn_mask_type=mask, window_size=span
    )

    def forward(q: Tensor) -> Tensor:
        turned = (each.reshape(*shape, *each.shape[1:]) for each in (q, k, v))
        return module(*turned, **(packs if count > 1 else {})).reshape(length, -1)

    return forward


def head(sizes: Sizes, machine: Machine) -> Iterator[Table]:
    """Compare an output layer with an odd number of rows with padded ones."""
    table = Table(f"Output layer: {sizes.tokens} tokens, hidden {sizes.head_hidden}, bf16, forward and backward")
    x = machine.random(sizes.tokens, sizes.head_hidden, grad=True)
    steps = {}
    for rows in sizes.head_rows:
        weight = (machine.random(rows, sizes.head_hidden) / sizes.head_hidden**0.5).detach().requires_grad_()
        product = lambda t, w=weight: F.linear(t, w)  # noqa: E731
        steps[f"{rows:,} rows"] = made_at_first(partial(training_step, product, x, [weight]))
    compare(table, steps, machine)
    yield table


PARTS: dict[str, Callable[[Sizes, Machine], Iterator[Table]]] = {
    "fp8": fp8,
    "ffn_fusion": ffn_fusion,
    "ssd": ssd,
    "attention": attention,
    "head": head,
}
