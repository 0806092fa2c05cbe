"""A rank of test_dependency.py: measures with its part of the calibration set.

    torchrun --nproc-per-node 2 dependency_rank.py FOLDER

FOLDER has overrides.json (of a training config), weights.pt and calibration.pt; dependency.jsonl and matrixRANK.pt are
written to it.
"""

import json
import sys
from pathlib import Path

import torch

from nemo_ext.megatron.cpu import runtime

runtime.enable()


def main(folder: Path) -> None:
    from nemo_ext.blockwise.data_parallel import share
    from nemo_ext.blockwise.parent import Parent
    from nemo_ext.job.config import compose
    from nemo_ext.megatron.session import build_model, data_parallel
    from nemo_ext.puzzle.fusion.dependency import measure_dependency

    with data_parallel():
        parent = Parent(*build_model(compose("train", json.loads((folder / "overrides.json").read_text()))))
        parent.model.load_state_dict(torch.load(folder / "weights.pt"), strict=False)
        matrix = measure_dependency(parent, share(torch.load(folder / "calibration.pt")), folder / "dependency.jsonl")
        torch.save(matrix, folder / f"matrix{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
