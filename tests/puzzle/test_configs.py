"""Training configs of a compression."""

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.start import with_model
from nemo_ext.job.config import compose


def test_flags_that_only_affect_speed_are_kept() -> None:
    config = compose("train", ["run_dir=unused", "data=mock", "model=domyn_small_tiny", "model.backend=local"])
    other = from_config(compose("describe", ["model=llama_nemotron_tiny"]))

    model = with_model(config, other, "child")["model"]

    assert (model["name"], model["backend"]) == ("child", "local")
    assert model["pattern"] != config["model"]["pattern"]
