import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.curriculum.job import run
from nemo_ext.data.curriculum.layout import read_order
from nemo_ext.job.config import compose
from nemo_ext.rl.nemo_rl.curriculum import VARIABLE, draw_step

BATCH = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Curriculum of three domains with files; one of them is not in every step."""
    folder = tmp_path_factory.mktemp("curriculum")
    prompts = [{"id": n, "prompt": f"q{n}", "domain": ("math", "code", "if.v2")[min(n % 20, 2)]} for n in range(400)]
    rollouts = [{"id": n, "reward": int(r < n % 4)} for n in range(400) for r in range(4)]
    for name, records in (("prompts", prompts), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [f"{name}={folder / name}.jsonl" for name in ("prompts", "rollouts")]
    run(compose("curriculum", [*words, f"output={folder / 'made'}", f"batch={BATCH}", "split_domains=true"]))
    return folder / "made"


class Loader:
    """Stand-in for a StatefulDataLoader of single-prompt batches."""

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        self.lines, self.next = path.read_text().splitlines(), begin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < len(self.lines):
            self.next += 1
            yield {"idx": [self.next - 1], "id": [json.loads(self.lines[self.next - 1])["id"]]}


def loaders_of(made: Path, begin: dict[str, int] | None = None) -> dict[str, Loader]:
    files = sorted((made / "domains").glob("*.jsonl"))
    return {f"domains-{file.stem}": Loader(file, begin=(begin or {}).get(f"domains-{file.stem}", 0)) for file in files}


def ids(batches: list[Any]) -> list[int]:
    return [batch["id"][0] for batch in batches]


def expected(made: Path) -> list[list[int]]:
    every = [json.loads(line)["id"] for line in (made / "curriculum.jsonl").read_text().splitlines()]
    return np.array(every).reshape(-1, BATCH).tolist()


def test_batches_are_those_of_the_ordered_file(made: Path) -> None:
    order = read_order(made)
    iterators = {name: iter(loader) for name, loader in loaders_of(made).items()}

    steps = [ids(draw_step(iterators, order)) for _ in range(len(order.domain))]

    assert steps == expected(made)
    assert sorted(iterators) == ["domains-code", "domains-if_v2", "domains-math"]
    assert (order.domain == order.names.index("math")).sum(axis=1).min() == 0, "a domain is not in every step"
    with pytest.raises(
        ValueError, match=rf"all {len(steps)} steps of the curriculum are done; set grpo.max_num_steps={len(steps)}"
    ):
        draw_step(iterators, order)


@pytest.mark.parametrize("killed", [1, 7, 20])
def test_dataloaders_that_resume_give_the_next_step(made: Path, killed: int) -> None:
    order, loaders = read_order(made), loaders_of(made)
    iterators = {name: iter(loader) for name, loader in loaders.items()}
    for _ in range(killed):
        draw_step(iterators, order)

    saved = {name: loader.next for name, loader in loaders.items()}
    resumed = {name: iter(loader) for name, loader in loaders_of(made, saved).items()}

    assert ids(draw_step(resumed, order)) == expected(made)[killed]


def test_dataloaders_out_of_step_are_refused(made: Path) -> None:
    order = read_order(made)
    anchor = f"domains-{order.names[order.anchor]}"
    shuffled = {name: iter(loader) for name, loader in loaders_of(made, {anchor: 1}).items()}
    apart = {
        name: iter(loader) for name, loader in loaders_of(made, {anchor: int(order.before[5, order.anchor])}).items()
    }
    lacking = {name: iter(loader) for name, loader in loaders_of(made).items() if name != anchor}

    with pytest.raises(
        ValueError, match=r"the next prompt is number \d+ of .*, but no step .* starts with it; set data.shuffle=false"
    ):
        draw_step(shuffled, order)
    with pytest.raises(ValueError, match="all dataloaders resumed from one checkpoint"):
        draw_step(apart, order)
    with pytest.raises(ValueError, match=r"data.train has the datasets"):
        draw_step(lacking, order)


@pytest.mark.nemo_rl
def test_nemo_rls_own_wrapper_and_dataloaders(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NeMo-RL's MultipleDataloaderWrapper and StatefulDataLoader, also from their saved state."""
    root = os.environ.get("NEMO_RL_ROOT")
    if not root:
        pytest.skip("NEMO_RL_ROOT is not set to a NeMo-RL checkout of 0.6 or later")
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    if not Path(root, "nemo_rl/data/dataloader.py").is_file():
        pytest.skip("this NeMo-RL does not support custom dataloaders; 0.6 and later do")
    monkeypatch.syspath_prepend(root)
    wrapper = importlib.import_module("nemo_rl.data.dataloader").MultipleDataloaderWrapper
    monkeypatch.setenv(VARIABLE, str(made))
    config = {"custom_dataloader": "nemo_ext.rl.nemo_rl.curriculum.next_batch"}
    files = sorted((made / "domains").glob("*.jsonl"))

    def collate(records: list[dict[str, Any]]) -> Any:
        batched = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        return batched({"idx": [r["idx"] for r in records], "message_log": [[r] for r in records]})

    def wrapped(states: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        loaders = {}
        for file in files:
            rows = [json.loads(line) | {"idx": n} for n, line in enumerate(file.read_text().splitlines())]
            name = f"domains-{file.stem}"
            loaders[name] = stateful(rows, batch_size=1, shuffle=False, collate_fn=collate, drop_last=True)
            if states:
                loaders[name].load_state_dict(states[name])
        return wrapper(expected_num_prompts=BATCH, data_config=config, dataloaders=loaders), loaders

    whole = expected(made)
    first, loaders = wrapped(None)
    got = [[log[0]["id"] for log in next(first)["message_log"]] for _ in range(9)]
    second, _ = wrapped({name: loader.state_dict() for name, loader in loaders.items()})
    got += [[log[0]["id"] for log in next(second)["message_log"]] for _ in range(9, len(whole))]

    assert got == whole
