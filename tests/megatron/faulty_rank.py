"""A rank with a fault at a step: FAULT=nan:6, spike:6 or hang:6:1 (a rank)."""

import os
import signal
import sys
import time
from typing import Any

from nemo_ext.job.parent import end_with_parent
from nemo_ext.megatron.rank import guard_helper, run


def stand_still() -> None:
    time.sleep(600)


def plant() -> None:
    from megatron.training import get_args

    from nemo_ext.megatron import forward_step

    kind, step, *rank = os.environ["FAULT"].split(":")
    loss_function = forward_step.loss_function

    def planted(loss_mask: Any, output: Any, **others: Any) -> Any:
        if get_args().curr_iteration + 1 == int(step) and output.requires_grad:
            if kind == "hang" and os.environ["RANK"] == rank[0]:
                stand_still()
            output = output * {"nan": float("nan"), "spike": 1e5}.get(kind, 1.0)
        return loss_function(loss_mask, output, **others)

    forward_step.loss_function = planted


if __name__ == "__mp_main__":
    guard_helper()
if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    run(sys.argv[1], plant)
