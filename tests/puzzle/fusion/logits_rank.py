"""A tensor-parallel rank of test_fusion.py: writes the full logits of checkpoints, or saves checkpoints again.

    torchrun --nproc-per-node 2 logits_rank.py FOLDER

FOLDER holds tokens.pt and jobs.json, a list of {config, checkpoint, logits} or {config, checkpoint, saved}: a composed
training config, the folder with the checkpoint's `.metadata`, and the file or the folder to write.
"""

import json
import sys
from pathlib import Path

import torch

from nemo_ext.megatron.cpu import mamba_modules

mamba_modules.install()


def main(folder: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from nemo_ext.megatron.session import build_model, data_parallel, load_weights

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    tokens = torch.load(folder / "tokens.pt")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with data_parallel(), torch.no_grad():
        for job in json.loads((folder / "jobs.json").read_text()):
            model = build_model(job["config"])[0].eval()
            load_weights(model, Path(job["checkpoint"]))
            if "saved" in job:
                dist_checkpointing.save(model.sharded_state_dict(), job["saved"])
                continue
            logits = gather_from_tensor_model_parallel_region(model(tokens, positions, None))
            if torch.distributed.get_rank() == 0:
                torch.save(logits, job["logits"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
