"""Training configs of a compression."""

from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.checkpoint.start import with_model
from nemo_ext.job.config import compose
from nemo_ext.puzzle.configs import healing_run, stage_config
from nemo_ext.puzzle.settings import settings


def test_flags_that_only_affect_speed_are_kept() -> None:
    config = compose("train", ["run_dir=unused", "data=mock", "model=domyn_small_tiny", "model.backend=local"])
    other = from_config(compose("describe", ["model=llama_nemotron_tiny"]))

    model = with_model(config, other, "child")["model"]

    assert (model["name"], model["backend"]) == ("child", "local")
    assert model["pattern"] != config["model"]["pattern"]


def test_a_healing_run_has_the_depths_of_the_parent_s_training_and_a_stage_has_none() -> None:
    config = compose("puzzle", ["run_dir=unused", "data=mock", "recipe=puzzle/nemotron3_super_quickstart"])
    description = from_config(config)
    assert str(description.architecture.pattern).count("/") == 1  # a checkpoint has both depths' weights once

    def heals(child: Description) -> dict[str, Any]:
        return healing_run(
            config,
            child,
            settings(config["puzzle"]).heal,
            run_dir=Path("x"),
            start=Path("x"),
            tokens=1e6,
            distillation=None,
        )

    kept, dropped = heals(description), heals(description.without_prediction())
    stage = stage_config(config, description, 1)

    assert kept["model"]["pattern"].count("/") == 2 and kept["megatron"]["mtp_use_repeated_layer"]
    for without in (dropped, stage):
        assert "/" not in without["model"]["pattern"]
        assert not any(name.startswith("mtp_") for name in without["megatron"])
