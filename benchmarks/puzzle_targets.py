"""Puzzle's published children: their cost by our cost model, and choices of our search under the same limits.

    python benchmarks/puzzle_targets.py [RUN_DIR] [--json FILE]

Nemotron 3 Puzzle 75B needs no run: its search uses the limits of hydra_conf/recipe/puzzle/nemotron3_super.yaml and a
proxy of the score, `proxy_score`, in place of a real parent's scores. The result shows that the limits determine the
cost of a child; the proxy, which does not depend on depth, says nothing about its quality.

For the children of Llama-Nemotron, RUN_DIR is a compression whose scores serve as plausible ones: `nemo-ext puzzle
'puzzle.stages=[parent,library,distill,score]' run_dir=RUN_DIR` on a small parent. A block of the large parent gets the
scores of the small one's block of its kind at the same relative depth, interpolated between scored widths. Limits and
serving scenarios are those of hydra_conf/recipe/puzzle/llama_nemotron_*.yaml. It takes a minute and no weights.
"""

import argparse
import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_ext.architecture import cost
from nemo_ext.architecture.block_configs import ffn_width
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.start import description_of
from nemo_ext.job.config import compose
from nemo_ext.job.report import markdown_table
from nemo_ext.puzzle.choice.choose import Costs, state_problem
from nemo_ext.puzzle.choice.search import solve
from nemo_ext.puzzle.cost import RESOURCES, Serving, block_costs, outside_costs, request_seconds
from nemo_ext.puzzle.score_file import Score, read_scores
from nemo_ext.puzzle.settings import Settings, settings
from nemo_ext.puzzle.variants import NO_OP, Variant, variants

ROOT = Path(__file__).parents[1]
TARGETS = {"super": "llama_nemotron_super_49b", "ultra": "llama_nemotron_ultra_253b"}
HYBRIDS = {"nemotron3_super": "nemotron3_puzzle_75b"}
"""Mapping from Puzzle recipes of hybrids to the models of the published children."""


class Plausible:
    """Scores of a small parent, by kind, relative depth and fraction of the FFN width."""

    def __init__(self, run_dir: Path) -> None:
        sizes = description_of(run_dir / "parent").architecture.sizes
        self.curves: dict[str, list[list[tuple[float, float]]]] = {"*": [], "-": []}
        rows = read_scores(run_dir / "blocks" / "scores.jsonl")
        for number, block in enumerate(sizes, start=1):
            own = {row.variant: row.kl for row in rows if row.block == number}
            points = [(0.0, own[NO_OP]), (1.0, 0.0)]
            for name, score in own.items():
                if name.startswith("ffn"):
                    points.append((int(name.removeprefix("ffn")) / block.size("ffn"), score))
            self.curves[block.kind].append(sorted(points))

    def score(self, kind: str, depth: float, share: float) -> float:
        """Score of a block at a depth from 0 to 1 that keeps this fraction of its width; 0 for a removed block."""
        curves = self.curves[kind]
        points = curves[round(depth * (len(curves) - 1))]
        after = max(1, bisect_left([place for place, _ in points], share))
        (left, low), (right, high) = points[after - 1], points[after]
        return low + (high - low) * (share - left) / (right - left)


def share_of(variant: Variant, parent: Any) -> float:
    """Fraction of the FFN width that a variant keeps; 1 for kept attention."""
    if variant.block is None:
        return 0.0
    return variant.block.size("ffn") / parent.size("ffn") if parent.kind == "-" else 1.0


def totals(architecture: Architecture, blocks: Sequence[Any], serving: Serving) -> dict[str, float]:
    """All resources of a model of these blocks, and the seconds of a batch of requests."""
    each = [block_costs(architecture, block, serving) for block in blocks]
    made = {name: sum(one[name] for one in each) + outside_costs(architecture, serving)[name] for name in RESOURCES}
    return made | {"request_seconds": request_seconds(made, new_tokens=serving.context - serving.prompt)}


def published_score(target: str, architecture: Architecture, plausible: Plausible) -> float | None:
    """Sum of the plausible scores of the published choice; None if fusion has changed its layers."""
    given = json.loads((ROOT / "hydra_conf" / "model" / "block_configs" / f"{target}.json").read_text())
    layers, sizes = given["block_configs"], architecture.sizes
    if 2 * len(layers) != len(sizes):
        return None
    score = 0.0
    for number, layer in enumerate(layers):
        depth, whole = number / (len(layers) - 1), sizes[2 * number + 1].size("ffn")
        ffn = layer["ffn"]
        share = 0.0 if ffn.get("no_op") else ffn_width(ffn["ffn_mult"], given["hidden_size"]) / whole
        score += plausible.score("*", depth, 0.0 if layer["attention"].get("no_op") else 1.0)
        score += plausible.score("-", depth, min(1.0, share))
    return score


def recipe(name: str) -> tuple[Settings, Architecture]:
    """Settings and parent of a Puzzle recipe; the parent is without multi-token prediction."""
    config = compose("puzzle", [f"recipe=puzzle/{name}", "data=mock", "run_dir=unused"])
    return settings(config["puzzle"]), from_config(config).without_prediction().architecture


def searched(
    architecture: Architecture, by_block: Sequence[Sequence[Variant]], scores: Sequence[Score], chosen: Settings
) -> tuple[list[Block | None], float]:
    """Blocks of the child with the lowest sum of scores within the recipe's limits, and this sum."""
    serving = chosen.serving
    costs = Costs(
        outside_costs(architecture, serving),
        {(v.number + 1, v.name): (v.block, block_costs(architecture, v.block, serving)) for e in by_block for v in e},
    )
    solution = solve(state_problem(scores, costs, chosen.search, serving), 1e-3, time_limit=600)
    blocks = [each[choice].block for each, choice in zip(by_block, solution.choice, strict=True)]
    return blocks, solution.score


def proxy_score(block: Block, parent: Block) -> float:
    """Sum over a block's sizes of the squared fraction that was removed, in place of a measured score."""
    return sum((1 - block.size(name) / size) ** 2 for name, size in parent.values if size and name != "window")


def hybrid_rows(name: str) -> list[dict[str, Any]]:
    """Rows of a hybrid parent, its published child and ours: totals, per-token and per-sequence costs, and sizes."""
    chosen, architecture = recipe(name)
    by_block, serving = variants(architecture, chosen.variants), chosen.serving
    parents = architecture.sizes
    scores = [
        Score(n + 1, v.name, proxy_score(v.block, parent), 0.0, 0.0, 1)
        for n, (each, parent) in enumerate(zip(by_block, parents, strict=True))
        for v in each
        if v.block is not None
    ]
    ours, _ = searched(architecture, by_block, scores, chosen)
    theirs = from_config(compose("describe", [f"model={HYBRIDS[name]}"])).without_prediction().architecture
    result = []
    for label, blocks in (("parent", parents), ("published", theirs.sizes), ("our search", ours)):
        kept = [block for block in blocks if block is not None]
        model, experts = architecture.with_pattern(Pattern(tuple(kept))), [block for block in kept if block.kind == "E"]
        total = totals(architecture, kept, serving)
        new = serving.context - serving.prompt
        result.append(
            {
                "target": name,
                "model": label,
                **total,
                "forward_flops": cost.forward_flops_per_token(model, seq_length=serving.context),
                "kv_bytes": cost.kv_cache_bytes(model, serving.context, precision=serving.cache_precision),
                "state_bytes": cost.state_bytes_per_sequence(model),
                "decode_tokens": serving.batch / total["decode_seconds"],
                "request_tokens": serving.batch * new / total["request_seconds"],
                "ffn_width": sum(block.size("ffn") for block in experts),
                "topk": sum(block.size("topk") for block in experts),
                "states": sorted({block.size("state") for block in kept if block.kind == "M"}),
                "score": sum(proxy_score(block, old) for block, old in zip(kept, parents, strict=True)),
            }
        )
    return result


def hybrid_table(made: Sequence[dict[str, Any]]) -> str:
    """Rows of `hybrid_rows` as Markdown."""
    heading = ["model", "B parameters", "B active", "GFLOPs per token", "KV, MB per sequence", "states, MB"]
    heading += ["tokens/s, decoding", "tokens/s, requests", "width of experts", "top-k", "Mamba state", "proxy score"]
    lines = [
        [
            row["model"],
            f"{row['parameters'] / 1e9:.2f}",
            f"{row['active_parameters'] / 1e9:.2f}",
            f"{row['forward_flops'] / 1e9:.1f}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            f"{row['state_bytes'] / 1e6:.1f}",
            f"{row['decode_tokens']:,.0f}",
            f"{row['request_tokens']:,.0f}",
            f"{row['ffn_width']:,}",
            str(row["topk"]),
            ", ".join(map(str, row["states"])),
            f"{row['score']:.2f}",
        ]
        for row in made
    ]
    return markdown_table(heading, lines)


def rows(name: str, run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the parent, the published child and ours."""
    chosen, architecture = recipe(f"llama_nemotron_{name}")
    plausible, by_block, serving = Plausible(run_dir), variants(architecture, chosen.variants), chosen.serving
    depths = len(by_block) // 2 - 1
    scores = [
        Score(
            n + 1, v.name, plausible.score(each[0].block.kind, n // 2 / depths, share_of(v, each[0].block)), 0.0, 0.0, 1
        )
        for n, each in enumerate(by_block)
        for v in each
        if each[0].block is not None
    ]
    ours, ours_score = searched(architecture, by_block, scores, chosen)
    theirs = from_config(compose("describe", [f"model={TARGETS[name]}"])).architecture
    result = []
    for label, of, blocks, score in (
        ("parent", architecture, list(architecture.sizes), 0.0),
        ("published", theirs, list(theirs.sizes), published_score(TARGETS[name], architecture, plausible)),
        ("our search", architecture, ours, ours_score),
    ):
        total = totals(of, blocks, serving)
        wide = [block.size("ffn") for block in blocks if block is not None and block.kind == "-"]
        result.append(
            {"target": name, "model": label, **total, "ffn_width": sum(wide), "ffns": len(wide), "score": score}
        )
    return result


def table(made: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown, with times as speed-ups over the parent."""
    heading = ["target", "model", "B parameters", "memory, GB", "attention", "FFNs", "width of all, k"]
    heading += ["prompts, x faster", "decoding, x", "requests, x", "sum of scores"]
    lines = []
    for row in made:
        parent = next(each for each in made if each["target"] == row["target"])
        faster = [f"{parent[key] / row[key]:.2f}" for key in ("prefill_seconds", "decode_seconds", "request_seconds")]
        lines.append(
            [
                row["target"],
                row["model"],
                f"{row['parameters'] / 1e9:.1f}",
                f"{row['memory_bytes'] / 1e9:.1f}",
                f"{row['attention_blocks']:.0f}",
                str(row["ffns"]),
                f"{row['ffn_width'] / 1e3:.0f}",
                *faster,
                "" if row["score"] is None else f"{row['score']:.3f}",
            ]
        )
    return markdown_table(heading, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, nargs="?", help="a compression with scores, for Llama-Nemotron")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    hybrids = [row for name in HYBRIDS for row in hybrid_rows(name)]
    print(hybrid_table(hybrids))
    made = [] if given.run_dir is None else [row for name in TARGETS for row in rows(name, given.run_dir)]
    if made:
        print(f"\n{table(made)}")
    if given.json is not None:
        given.json.write_text(json.dumps([*hybrids, *made], indent=1) + "\n")


if __name__ == "__main__":
    main()
