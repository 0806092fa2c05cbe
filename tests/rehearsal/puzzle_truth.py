"""Peak memory of a Puzzle stage on real tensors: `python puzzle_truth.py REQUEST.json` (as for `puzzle_rank`)."""

import json
import sys
from pathlib import Path
from typing import Any

from nemo_ext.megatron.session import data_parallel
from nemo_ext.puzzle.settings import settings
from nemo_ext.rehearsal.puzzle_rank import run_stage
from nemo_ext.rehearsal.tracker import SCALAR, Tracker


class Real(Tracker):
    """Tracker for real tensors, whose values are known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args) if func is SCALAR else super().__torch_dispatch__(func, types, args, kwargs)


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    tracker = Real()
    tracker.kind = "temporary"
    with data_parallel(), tracker:
        run_stage(request["config"], settings(request["puzzle"]), request["stage"], 1, tracker)
    peak = {kind: size for kind, size in tracker.peak.items() if size}
    print(json.dumps({"peak": peak, "flops": sum(tracker.flops.values())}))
