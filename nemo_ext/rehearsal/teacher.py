"""The teacher in a rehearsed distillation: its model, without weights."""

from collections.abc import Mapping
from typing import Any

from nemo_ext.checkpoint.start import model_of
from nemo_ext.job.settings import prefixed_errors


def with_teacher(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training config of a rehearsed run's teacher.

    Raises:
        ValueError: the model cannot be the teacher of this run, or does not fit its layout.
    """
    from nemo_ext.megatron.arguments import quiet_imports
    from nemo_ext.megatron.check import check_layout

    with quiet_imports():
        from nemo_ext.megatron.distillation import one_stage_a_rank, with_model_of

        one_stage_a_rank(config)
        teacher = config["distillation"]["teacher"]
        merged = with_model_of(config, model_of(str(teacher), "distillation.teacher"))
    with prefixed_errors(f"distillation.teacher={teacher} does not fit the layout of this run"):
        check_layout(merged, trained=False)
    return merged
