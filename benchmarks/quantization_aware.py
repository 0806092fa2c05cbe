"""Share of the loss to quantisation that quantisation-aware distillation wins back, over several seeds.

    python benchmarks/quantization_aware.py RUN_DIR [--steps 24] [--batch 4] [--lr 1e-4] [--seeds 2] [key=value ...]

The student starts as the run's model, computes with weights and inputs rounded to NVFP4 everywhere except the output
layer (or by the plan of key=value), and learns the unrounded model's logits on the run's training data: AdamW without
weight decay, cosine to zero, on one process. A seed starts at other sequences. Printed for each seed: mean
KL(model || student) in nats per token and mean LM loss on 64 validation sequences, before and after.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from nemo_ext.blockwise.token_batches import TokenBatches
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import read_config
from nemo_ext.megatron.divergence import kl_divergence
from nemo_ext.megatron.float8_modules import use_float8
from nemo_ext.megatron.fp8 import Precision
from nemo_ext.megatron.session import build_model, data_parallel, load_weights

PLAN = ["precision=nvfp4", 'precision_plan.rules=["head bf16"]']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=2)
    chosen, words = parser.parse_known_args()
    config = read_config(chosen.run / "config.yaml")
    plan = compose("train", words or PLAN)["precision_plan"]
    precision = Precision.from_config({**config, "precision_plan": plan, "train": {"quantization_aware": True}})
    assert precision is not None
    with data_parallel():
        (parent, _), (student, _) = build_model(config), build_model(config)
        folder = checkpoint_folder(chosen.run / "checkpoints")
        load_weights(parent, folder)
        use_float8(student, precision, range(len(precision.architecture.sizes)))
        device = next(parent.parameters()).device
        held_out = TokenBatches(config, "valid", 64, device).batches(8)
        data = TokenBatches(config, "train", chosen.seeds * chosen.steps * chosen.batch, device)

        def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens, torch.arange(tokens.shape[1], device=device).expand_as(tokens), None)

        def measured() -> tuple[float, float]:
            student.eval()
            with torch.no_grad():
                pairs = [(logits(student, tokens), logits(parent, tokens), tokens) for tokens in held_out]
                divergences = [kl_divergence(mine, theirs).mean().item() for mine, theirs, _ in pairs]
                losses = [
                    cross_entropy(mine[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
                    for mine, _, tokens in pairs
                ]
            return sum(divergences) / len(divergences), sum(losses) / len(losses)

        parent.eval()
        for seed in range(chosen.seeds):
            load_weights(student, folder)
            before = measured()
            optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
            batches = data.stream(seed * chosen.steps, chosen.batch)
            student.train()
            for step in range(chosen.steps):
                tokens = next(batches)
                for group in optimizer.param_groups:
                    group["lr"] = chosen.lr * min(1, (step + 1) / 5) * (1 + math.cos(math.pi * step / chosen.steps)) / 2
                with torch.no_grad():
                    wanted = logits(parent, tokens)
                optimizer.zero_grad()
                kl_divergence(logits(student, tokens), wanted).mean().backward()
                optimizer.step()
            after = measured()
            names = ("divergence", "loss")
            row = {
                f"{name} {when}": round(value, 5)
                for when, pair in (("before", before), ("after", after))
                for name, value in zip(names, pair, strict=True)
            }
            print(json.dumps({"seed": seed, **row, "won back": round(1 - after[0] / before[0], 3)}), flush=True)


if __name__ == "__main__":
    main()
