"""Megatron's fault tolerance: the parts that work here, and the package that they need."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_ext.job.config import compose
from nemo_ext.megatron.arguments import command_line
from nemo_ext.megatron.check import check, check_launcher

ASYNCHRONOUS = ("megatron.async_save=true", "megatron.use_persistent_ckpt_worker=true")


@pytest.mark.parametrize(
    ("found", "words", "said"),
    [
        (None, ("operation=cluster",), None),
        (None, ASYNCHRONOUS, "async_strategy=nvrx, Megatron's default, writes with nvidia-resiliency-ext"),
        (None, ("megatron.enable_ft_package=true",), "enable_ft_package requires nvidia-resiliency-ext"),
        ("0.4.1", (), r"nvidia-resiliency-ext 0\.4\.1 is installed, but Megatron-Core .* before 0\.6\.0"),
        ("0.7.0", (*ASYNCHRONOUS, "megatron.enable_ft_package=true"), None),
    ],
)
def test_the_package_is_required_in_a_recent_version(
    monkeypatch: pytest.MonkeyPatch, megatron: None, found: str | None, words: tuple[str, ...], said: str | None
) -> None:
    def version(name: str) -> str:
        if name != "nvidia-resiliency-ext":
            return real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    real = importlib.metadata.version
    config = compose("train", ["run_dir=unused", "data=mock", *words])
    monkeypatch.setattr(importlib.metadata, "version", version)
    if said is None:
        check(config)
    else:
        with pytest.raises(ValueError, match=said):
            check(config)


def test_features_of_other_launchers_and_loops_are_refused() -> None:
    check_launcher(compose("train", ["run_dir=unused"]))
    with pytest.raises(ValueError, match="requires ft_launcher"):
        check_launcher(compose("train", ["run_dir=unused", "megatron.enable_ft_package=true"]))
    with pytest.raises(ValueError, match="inprocess_restart would have no effect"):
        command_line(compose("train", ["run_dir=unused", "data=mock", "megatron.inprocess_restart=true"]))


def test_stragglers_are_distinguished_by_their_batches_and_forward_passes(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., torch.nn.Module]
) -> None:
    build("model=domyn_small_tiny", "model.pattern=-")  # sets Megatron up
    from nemo_ext.megatron import forward_step

    seen: list[str] = []
    detector: Any = forward_step._stragglers

    def start() -> None:
        seen.append("batch" if detector.bdata else "forward")
        detector.bdata = False  # as its own does

    monkeypatch.setattr(detector, "start", start)
    monkeypatch.setattr(detector, "stop", lambda: seen.append("end"))

    def batches() -> Any:
        seen.append("read")
        yield {name: torch.ones(1, 4) for name in ("tokens", "labels", "position_ids", "loss_mask")}

    def model(*_: Any, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        seen.append("model")
        return labels

    forward_step.forward_step(batches(), model)  # type: ignore[arg-type]

    assert seen == ["batch", "read", "end", "forward", "model", "end"]
