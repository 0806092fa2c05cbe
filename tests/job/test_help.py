"""`nemo-ext JOB --help`."""

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from nemo_ext.job.help import keys_of
from nemo_ext.job.registry import jobs

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def helped(command: Command) -> Callable[[str], str]:
    return lambda job: command(job, "--help").stdout


def test_it_has_defaults_a_line_and_the_groups_of_the_job(helped: Callable[[str], str]) -> None:
    text = helped("train")

    assert "train.warmup_tokens=0           length of the linear learning-rate warm-up" in text
    assert "precision=                      auto, bf16, fp32" in text
    assert "suite=" not in text.partition("Config files by name")[2]


def test_a_key_that_the_help_text_explains_is_not_listed_again(helped: Callable[[str], str]) -> None:
    further = helped("generate").partition("Further settings")[2]

    assert "serving.engine=transformers     transformers (any machine" in further
    assert "generate.temperature" not in further and "generate.attempts" not in further


@pytest.mark.parametrize("job", [job.name for job in jobs() if job.name != "train"])
def test_every_key_of_the_jobs_config_is_named(job: str, command: Command) -> None:
    text = command(job, "--help").stdout

    keys = [key for key, *_ in keys_of("hydra_conf", job) if key != "served" and not key.startswith("megatron.")]
    assert text.startswith(f"nemo-ext {job}: ")
    assert [
        key for key in keys if key.rpartition(".")[2] not in text and f"{key.partition('.')[0]}.*" not in text
    ] == []
    further = re.findall(
        r"^  ([a-z_][\w.]*)=", text.partition("Further settings")[2].partition("Config files")[0], re.M
    )
    assert len(further) == len({*further})
    assert re.findall(r"^  [a-z_]\S*=\S*$(?!\n {20})", text, re.M) == [], "settings without a description"
