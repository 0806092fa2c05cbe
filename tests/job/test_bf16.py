from pathlib import Path

import pytest

from nemo_ext.job import bf16
from nemo_ext.job.config import compose
from nemo_ext.job.rank import check_machine


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_chosen_where_it_is_fast(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bf16, "is_fast", lambda: fast)

    # The seed distinguishes configs of which the tests keep only one.
    config = compose("train", ["precision=auto", f"megatron.seed={int(fast)}"])

    assert config["megatron"]["bf16"] is fast
    config = compose("train", ["precision=bf16", f"run_dir={tmp_path}"])
    check_machine(config)
    warned = "this CPU has no instructions for BF16" in " ".join(capsys.readouterr().err.split())
    assert warned is not fast
