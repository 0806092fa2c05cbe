"""A program: one step of a training config on real tensors, its highest memory by torch's own allocator.

python truth.py ASKED.json: prints the bytes that were allocated at the highest, from before the model was built.
"""

import json
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from nemo_ext.megatron.rank import leave
from nemo_ext.rehearsal import rank, world
from nemo_ext.rehearsal.tracker import Tracker

asked = json.loads(Path(sys.argv[1]).read_text())
with world.fake_world(0, 1):
    arguments = world.megatron_arguments(asked["config"])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        models = rank.step(asked["config"], arguments, Tracker(), asked["micro_batches"])
# Allocations and their ends, in the order in which they happened.
changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
live = highest = 0
for event in sorted(changes, key=lambda each: each.start_ns()):
    live += event.nbytes()
    highest = max(highest, live)
print(highest)
leave(0)
