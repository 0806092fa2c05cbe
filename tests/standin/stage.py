"""`nemo_ext.puzzle.rank`: a rank of a stage, which meets the others and leaves a file once all have."""

import importlib.util
import os
import sys
import time
from pathlib import Path

from nemo_ext.job.rank import leave, main

_OF_TRAINING = importlib.util.find_spec("nemo_ext.megatron.rank")
assert _OF_TRAINING is not None and _OF_TRAINING.loader is not None
_TRAINING = importlib.util.module_from_spec(_OF_TRAINING)
_OF_TRAINING.loader.exec_module(_TRAINING)


def work(config_path: str) -> None:
    """With STAND_IN_HOLDS_AT the first start waits until it is interrupted."""
    folder, rank = Path(config_path).parent, int(os.environ["RANK"])
    ranks = _TRAINING.Ranks(rank, int(os.environ["WORLD_SIZE"]))
    begun = folder / f"begun-{rank}"
    first = not begun.exists()
    begun.touch()
    while os.environ.get("STAND_IN_HOLDS_AT") and ranks.any(first):
        time.sleep(0.05)
    (folder / f"stage-{rank}").touch()


if __name__ == "__main__":
    leave(main(sys.argv[1], "stage.log", work))
