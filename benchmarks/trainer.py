"""Step time of `nemo-ext train` compared with Megatron's `pretrain()` with the same model, data and runtime.

    python benchmarks/trainer.py [--recipe nemotron3_nano/quickstart] [--steps 40] [--rounds 3] [--json FILE]

The plain rank uses the same model config, Megatron's GPTDataset on the same tokens and a forward step of a dozen lines;
ours adds metrics, phases, reports and guards. They alternate in separate processes; seconds are Megatron's, for every
step except the first ten. The limit is 1.01.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
SKIPPED = 10


def plain(config_path: str) -> None:
    """A rank with only Megatron and the model."""
    from nemo_ext.job.run_directory import read_config
    from nemo_ext.megatron.cpu import runtime

    config = read_config(Path(config_path))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    runtime.enable()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.enums import ModelType
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.utils import get_blend_and_blend_per_split

    from nemo_ext.megatron.arguments import command_line, pattern_with_cuts
    from nemo_ext.megatron.model import model_config
    from nemo_ext.megatron.trainer import share_cores
    from nemo_ext.megatron.versions import model_of_container

    share_cores(1)
    sys.argv = [sys.argv[0], *command_line(config)]
    arguments = parse_and_validate_args()

    def provider(samples: list[int], vp_stage: int | None = None) -> Any:
        blend, blend_per_split = get_blend_and_blend_per_split(arguments)
        settings = GPTDatasetConfig(
            random_seed=arguments.seed,
            sequence_length=arguments.seq_length,
            blend=blend,
            blend_per_split=blend_per_split,
            split=arguments.split,
            path_to_cache=arguments.data_cache_path,
            tokenizer=build_tokenizer(arguments),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, settings).build()
        return train, None, None

    def loss(mask: Any, output: Any) -> Any:
        total, tokens = (output.float() * mask).sum(), mask.sum().int()
        import torch

        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    def forward(iterator: Any, model: Any) -> Any:
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(iterator).items()}
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(loss, batch["loss_mask"])

    model = model_config(config["model"], pattern_with_cuts(config), arguments)
    container = pretrain_cfg_container_from_args(arguments, model)
    kind = ModelType.encoder_or_decoder
    pretrain(container, provider, model_type=kind, forward_step_func=forward, **model_of_container(container))


def ours(config_path: str) -> None:
    """A rank of `nemo-ext train`."""
    from nemo_ext.megatron.rank import run

    run(config_path)


RANKS = {"plain": plain, "ours": ours}


def seconds(kind: str, config: Path) -> list[float]:
    """Seconds per step of a rank, without the first steps."""
    command = [sys.executable, "-W", "ignore", __file__, "--rank", kind, str(config)]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **place}, check=False)
    found = [float(each) / 1e3 for each in STEP.findall(ended.stdout)]
    if len(found) <= SKIPPED:
        sys.exit(
            f"{kind} ended with {ended.returncode} after {len(found)} steps:\n{ended.stdout[-3000:]}{ended.stderr}"
        )
    return found[SKIPPED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nemotron3_nano/quickstart")
    parser.add_argument("--steps", type=int, default=40, help="steps per run, of which the first ten are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--json", type=Path, help="also write the seconds to this file")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        RANKS[arguments.rank[0]](arguments.rank[1])
        return
    from nemo_ext.data.training import tokenize_streams
    from nemo_ext.job.config import compose
    from nemo_ext.launch import prepare

    with tempfile.TemporaryDirectory() as folder:
        configs = {}
        for kind in RANKS:
            words = [f"recipe={arguments.recipe}", f"run_dir={folder}/{kind}", f"data_root={folder}/data"]
            words += ["launcher.nproc_per_node=1", "megatron.eval_iters=0"]
            words += ["megatron.log_interval=1", "megatron.save_interval=100000", "memory_profile=null"]
            config = compose("train", words)
            config["megatron"]["exit_interval"] = arguments.steps
            tokenize_streams(config.get("data"))
            configs[kind] = prepare(config)
        found: dict[str, list[list[float]]] = {kind: [] for kind in RANKS}
        for number in range(arguments.rounds):
            for kind in sorted(RANKS, reverse=bool(number % 2)):
                found[kind].append(seconds(kind, configs[kind]))
                print(f"round {number + 1}, {kind}: {median(found[kind][-1]) * 1e3:.1f} ms per step", flush=True)
    medians = {kind: median(each for round_ in rounds for each in round_) for kind, rounds in found.items()}
    print(f"ours / plain: {medians['ours'] / medians['plain']:.3f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
