"""NeMo-RL versions without parts that nemo_ext uses; other differences are tested where they matter."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from nemo_ext.rl.nemo_rl import compat


def test_what_a_newer_nemo_rl_lacks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nemo_rl" / "algorithms").mkdir(parents=True)
    for name in ("__init__.py", "algorithms/__init__.py", "algorithms/grpo.py"):
        (tmp_path / "nemo_rl" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)

    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
            del sys.modules[name]
        with pytest.raises(ValueError, match=r"has no nemo_rl.algorithms.async_utils; use a supported version, 0.5 to"):
            compat.algorithm("async_utils")
        with pytest.raises(
            ValueError, match=r"has no nemo_rl.algorithms.grpo.ClippedPGLossFn; use a supported version"
        ):
            compat.part(compat.algorithm("grpo"), "ClippedPGLossFn")


def test_no_nemo_rl_is_another_line() -> None:
    with (
        patch.dict(sys.modules, {"nemo_rl": None}),
        pytest.raises(ValueError, match=r"cannot be imported .*PYTHONPATH"),
    ):
        compat.algorithm("dpo")


@pytest.mark.parametrize(("name", "count"), [("grpo", 10), ("grpo", 13), ("distillation", 11), ("dpo", 9)])
def test_results_of_setup_are_named_and_others_refused(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(range(count))
    monkeypatch.setattr(compat, "algorithm", lambda module: SimpleNamespace(setup=lambda *given: tuple(items)))

    ready = compat.set_up(name, {}, None, None, None)
    items.append(count)

    assert ready.policy == 0 and len(vars(ready)) == count and vars(ready).keys() >= {"loss_fn", "save_state", "config"}
    with pytest.raises(ValueError, match=rf"{name}\.setup returned {count + 1} items instead of .*{count}.*; use "):
        compat.set_up(name, {}, None, None, None)
