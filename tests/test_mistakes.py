"""What is wrong with the words of a command, in one line."""

import sys
from pathlib import Path

import pytest

from nemo_ext.job.config import FULL_ERROR, USER_ERROR, compose, run_job
from nemo_ext.pipeline import submit as pipeline
from nemo_ext.slurm.settings import settings_of

EVIL = "# @package _global_\ndata:\n  directory: x\n  tokenizer: !!python/object:os.system {}\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    for group in ("data", "pipeline", "directory"):
        (tmp_path / group).mkdir()
    (tmp_path / "data" / "evil.yaml").write_text(EVIL)
    (tmp_path / "data" / "latin.yaml").write_bytes("# @package _global_\nkind: f\u00fcnf\n".encode("latin-1"))
    stage = "{job: train, words: [megatrn.lr=1]}"
    (tmp_path / "pipeline" / "mine.yaml").write_text(
        f"# @package _global_\npipeline: mine\nstages: {{first: {stage}}}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["max_bad_share=0.5"], "Could not override 'max_bad_share': it belongs to a source: in place of input=FILE"),
        (["inptu=x"], "Could not override 'inptu': tokenize has no such key; `nemo-ext tokenize --help` lists"),
        (["data=evil"], "data/evil.yaml, line 4: could not determine a constructor for the tag"),
        (["data=nosuch"], "data=nosuch: no such data: known: "),
        (["data=latin"], "a YAML file of this config is not UTF-8"),
        (["+launcher=null"], "launcher=None: expected a section"),
        (["+phases=3"], "phases=3: expected a section"),
        (
            ["directory=x"],
            "directory: tokenize has no such config group; if you meant a key, move the folder directory out",
        ),
    ],
)
def test_a_config_that_cannot_be_composed_is_one_line(
    mine: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FULL_ERROR, raising=False)
    given = [f"--config-dir={mine}", *words]
    with pytest.raises(ValueError, match=r"\w") as raised:
        compose("tokenize", given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)

    monkeypatch.setattr(sys, "argv", ["tokenize", *given])
    with pytest.raises(SystemExit) as ended:
        run_job("tokenize", lambda config: None)
    told = capfd.readouterr().err
    assert ended.value.code == USER_ERROR
    assert said in told
    assert told.startswith("error: ")
    assert told.count("\n") == 1


def test_streams_over_a_tree_say_what_replaces_it() -> None:
    with pytest.raises(ValueError, match=r"'data.streams': .* replace them with streams="):
        compose("train", ["recipe=olmo1/1b", "data.streams=[]"])


def test_a_bad_key_of_a_stage_names_the_stage(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "queued", dict)
    said = r"^stages\.first: Could not override 'megatrn.lr': train has no such key; .*$"
    with pytest.raises(ValueError, match=said):
        pipeline.submit(["pipeline=mine", f"--config-dir={mine}", "run_dir=unused"], dry_run=True)


@pytest.mark.parametrize("account", ["X;rm -rf .", "X\n#SBATCH", "$HOME", "-A", "X Y", ""])
def test_an_account_is_a_name(account: str) -> None:
    with pytest.raises(ValueError, match=r"account='.*' is not a valid name in Slurm: use only letters, digits"):
        settings_of([f'account="{account}"' if account else "account=''"])
    assert settings_of(["account=EUHPC_D01-200@site.eu"]).account == "EUHPC_D01-200@site.eu"
