"""Training configs of a compression."""

from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.description import Description, differences, from_config, to_config
from nemo_ext.checkpoint.start import with_model
from nemo_ext.job.config import compose
from nemo_ext.puzzle.configs import healing_run, stage_config
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.stages.realise import child
from nemo_ext.puzzle.variants import variants


def test_flags_that_only_affect_speed_are_kept() -> None:
    config = compose("train", ["run_dir=unused", "data=mock", "model=domyn_small_tiny", "model.backend=local"])
    other = from_config(compose("describe", ["model=llama_nemotron_tiny"]))

    model = with_model(config, other, "child")["model"]

    assert (model["name"], model["backend"]) == ("child", "local")
    assert model["pattern"] != config["model"]["pattern"]


def test_a_child_may_have_experts_in_its_prediction_depths_alone() -> None:
    parent = from_config(compose("describe", ["model=nemotron3_super_tiny", 'model.pattern="ME/*E"']))
    experts, mamba = (variants(parent.architecture)[number] for number in (1, 0))

    kept, dropped = (child(each, [mamba[0], experts[-1]]) for each in (parent, parent.without_prediction()))

    assert str(kept.architecture.pattern) == "M/*E" and kept.router is not None
    assert str(dropped.architecture.pattern) == "M" and dropped.router is None
    assert not any(differences(from_config(to_config(each)), each) for each in (kept, dropped))


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
