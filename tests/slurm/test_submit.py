"""`nemo-ext submit` without Slurm: refusals with their reasons, and the exact command."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.job.registry import job as find
from nemo_ext.job.registry import jobs
from nemo_ext.megatron import packed_attention
from nemo_ext.slurm import attempts
from nemo_ext.slurm import submit as submit_module
from nemo_ext.slurm.jobs import makes
from nemo_ext.slurm.preflight import Finding, findings, unknown_to_slurm
from nemo_ext.slurm.settings import settings_of
from nemo_ext.slurm.submit import SCRIPTS, by_hand, by_megatron, checked, hand_over, planned, submit
from tests.composing import RECIPES

REPOSITORY = Path(__file__).parents[2]
SITES = ("leonardo", "dgx_h100")


def errors(*words: str, paths: bool = False) -> list[str]:
    submission = planned(words)
    found = findings(submission.config, submission.settings, paths=paths)
    return [one.text for one in found if one.kind == "error"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "recipe=domyn_small/cpt",
        "cluster=leonardo",
        "account=X",
        "run_dir=r",
        'slurm.options=["--mail-type=END"]',
    ]

    assert planned(words).command() == [
        *("sbatch", "--parsable", "--job-name=train-r", "--account=X", "--partition=boost_usr_prod", "--nodes=64"),
        *("--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8", "--time=24:00:00", "--signal=B:USR2@600"),
        *(f"--output={tmp_path}/r/slurm/%j.out", f"--export=ALL,NEMO_EXT_PYTHON={sys.executable}", "--mail-type=END"),
        *(str(SCRIPTS / "train.sbatch"), "cluster=leonardo", "account=X", 'slurm.options=["--mail-type=END"]'),
        *("operation=cluster", "recipe=domyn_small/cpt", "run_dir=r"),
    ]
    own = planned(["operation=none", *words])
    assert [word for word in own.words if word.startswith("operation=")] == ["operation=none"]
    assert own.config["guard"]["nan"] is False


TASKS = ("job=rl_tasks", "generator=arithmetic", "output=t.jsonl", "cluster=testbed")


@pytest.mark.parametrize("place", ["/proc/nope", "/dev/null/below", "/proc/self/fd"])
def test_a_run_directory_that_cannot_be_made_is_refused(place: str) -> None:
    (said,) = errors(*TASKS, f"slurm.folder={place}", paths=True)

    assert said.startswith(f"run_dir={place}: ")
    assert said.endswith("; choose a writable directory")


def test_special_characters_of_slurm_in_paths_are_escaped_or_refused(tmp_path: Path) -> None:
    (percent,) = (
        word for word in planned([*TASKS, f'slurm.folder="{tmp_path}/100%j é"']).command() if "--output=" in word
    )

    assert percent == f"--output={tmp_path}/100%%j é/slurm/%j.out"
    assert not errors(*TASKS, f'slurm.folder="{tmp_path}/100%j é"', paths=True)
    assert not list(tmp_path.iterdir()), "looking leaves nothing"
    for name in ("back\\slash", "new\nline"):
        (said,) = errors(*TASKS, f'slurm.folder="{tmp_path}/{name}"', paths=True)
        assert "a backslash, a line break or another control character; choose another" in said


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    empty, hf, whole = (tmp_path / name for name in ("empty", "hf", "whole"))
    for folder in (empty, hf, whole / "release"):
        folder.mkdir(parents=True)
    (hf / "config.json").write_text("{}")
    (whole / "release" / ".metadata").touch()
    (whole / "latest_checkpointed_iteration.txt").write_text("release")
    train = ("recipe=olmo1/1b", "cluster=testbed", f"run_dir={tmp_path}/run")
    key = "megatron.pretrained_checkpoint"

    def about(key: str, *words: str) -> list[str]:
        return [text for text in errors(*words, paths=True) if text.startswith(f"{key}=")]

    assert "neither a Hugging Face checkpoint" in about(key, *train, f"{key}={empty}")[0]
    assert "convert it to Megatron with `nemo-ext convert`" in about(key, *train, f"{key}={hf}")[0]
    assert not about(key, *train, f"{key}={whole}")
    (whole / "latest_checkpointed_iteration.txt").write_text("7")
    assert "choose a complete one (available: release)" in about(key, *train, f"{key}={whole}")[0]
    convert = ("job=convert", f"to={tmp_path}/to", "cluster=testbed")
    assert about("from", *convert, f"from={empty}")
    assert "no weights" in about("from", *convert, f"from={hf}")[0]
    (hf / "model.safetensors").touch()
    assert not about("from", *convert, f"from={hf}")


def test_the_lines_of_a_dry_run_can_be_pasted(tmp_path: Path, programs: Callable[..., Path]) -> None:
    folder = tmp_path / "a $b"
    programs(
        sbatch='for word; do case "$word" in --output=*) cd "$(dirname "${word#*=}")" || exit 1;; esac; done\n'
        f'echo "$@" >> {tmp_path}/said; wc -l < {tmp_path}/said'
    )
    submission = planned([*TASKS, f'slurm.folder="{folder}"'])
    chain = [
        *by_hand(replace(submission, rounds=2), "first-one"),
        *by_hand(replace(submission, after=("$first_one",), beside=("7",))),
    ]

    assert subprocess.run(["bash", "-euc", "\n".join(chain)], check=True, capture_output=True).stdout == b"3\n"

    first, second, third = (tmp_path / "said").read_text().splitlines()
    assert "--dependency" not in first and f"--output={folder}/rounds/1/slurm/%j.out" in first
    assert "--dependency=afterok:1 " in second and f"--output={folder}/slurm/%j.out" in second
    assert "--dependency=afterok:2,after:7 " in third


def test_mistakes_about_the_site_are_named_together(tmp_path: Path, programs: Callable[..., Path]) -> None:
    programs(sinfo="echo debug boost_usr_prod", sacctmgr="echo normal boost_qos_dbg", singularity="")
    (tmp_path / "tasks").mkdir()
    words = [
        *(
            "job=rl",
            "preset=domyn_math_grpo",
            "model=nowhere",
            f"tasks.train.path={tmp_path}/tasks",
            f"run_dir={tmp_path}/run",
        ),
        *("cluster=leonardo", "cluster.qos=boost_qos_dgb", "cluster.partition=boost_usr_prd"),
        *("cluster.container.image=/none.sif", "cluster.container.binds=[/none]"),
    ]

    found = {one.text.partition(":")[0]: one for one in checked(planned(words))}

    wrong = {key for key, one in found.items() if one.kind == "error"}
    assert wrong >= {
        *("cluster.qos=boost_qos_dgb", "cluster.partition=boost_usr_prd", "cluster.container.image=/none.sif"),
        *("model=nowhere", f"tasks.train.path={tmp_path}/tasks"),
    }
    assert "did you mean 'boost_usr_prod'" in found["cluster.partition=boost_usr_prd"].text
    assert found["cluster.container.binds"].kind == "warning"
    (known,) = unknown_to_slurm(settings_of(["cluster=leonardo", "cluster.qos=boost_qos_lprod"]))
    assert "cluster.qos=boost_qos_lprod: unknown to Slurm" in known.text, "only the site's file has it"


@pytest.mark.parametrize(
    ("free", "said"),
    [(1e9, ["error", "has 1.0 GB free, but a checkpoint takes about 16.5 GB, and 50 are kept"]), (1e11, ["warning"])],
)
def test_too_little_disk_space_for_checkpoints_is_reported(
    free: float, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=int(free)))
    submission = planned(["recipe=olmo1/1b", "cluster=leonardo", f"run_dir={tmp_path}/run"])

    (found,) = (one for one in findings(submission.config, submission.settings) if "free disk space" in one.text)

    assert found.kind == said[0]
    assert all(text in found.text for text in said[1:])


def test_a_finished_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TASKS, f"slurm.folder={tmp_path}"]
    attempts.finish(tmp_path, step=None, words=["generator=arithmetic", "output=t.jsonl"])

    assert submit(words, dry_run=False) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}: finished before; remove {tmp_path}/slurm/finished.json to run it again\n"
    )
    submit([*words, "count=7"], dry_run=True)
    assert "finished before" not in capsys.readouterr().out, "it has more to do"


def test_gpus_are_kept_on_nodes_of_another_size() -> None:
    eight = planned(["recipe=olmo3/7b_pretrain", "cluster=leonardo"])
    said = planned(["recipe=olmo3/7b_pretrain", "cluster=leonardo", "launcher.nodes=2", "launcher.nproc_per_node=4"])

    assert eight.config["launcher"] == {"nodes": 128, "nproc_per_node": 4}
    assert eight.notes[0] == Finding("note", "512 GPUs: 128 nodes with 4 GPUs each on leonardo")
    assert eight.notes[1].text.startswith("operation=cluster, as the job uses several nodes")
    assert said.config["launcher"] == {"nodes": 2, "nproc_per_node": 4}
    assert "--nodes=2" in said.command()
    assert not any(word.startswith("launcher.") for word in said.words), "the allocation says these"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["time=30:00:00", "megatron.fp8_format=hybrid"],
            [
                "normal of leonardo allows 24:00:00; no quality of service of the site allows it",
                "A100-64GB does not support FP8; train in bf16",
            ],
        ),
        (
            ["launcher.nodes=65", "precision=fp8_current"],
            [
                "allows 64 nodes; set cluster.qos=boost_qos_bprod, which allows it",
                "precision_plan: A100-64GB does not support FP8; train in bf16",
            ],
        ),
        (
            ["time=30:00:00", "launcher.nodes=2", "megatron.tensor_model_parallel_size=1"],
            ["set cluster.qos=boost_qos_lprod, which allows it", "of the 64 of a A100-64GB"],
        ),
        (["launcher.nproc_per_node=8"], ["a node of leonardo has 4 GPUs"]),
        (["megatron.tensor_model_parallel_size=3"], ["not divisible by TP x PP x CP = 6"]),
    ],
)
def test_settings_that_do_not_fit_a_site_are_refused(words: list[str], said: list[str]) -> None:
    found = errors("recipe=domyn_small/cpt", "cluster=leonardo", *words)

    assert [text for text in said if not any(text in each for each in found)] == [], found


def test_h100s_support_fp8() -> None:
    words = ("recipe=domyn_small/cpt", "cluster=dgx_h100")
    assert not errors(*words, "megatron.fp8_format=hybrid")
    assert not errors(*words, "precision=fp8_blockwise")
    assert errors(*words, "precision=mxfp8") == [
        "precision_plan: H100-80GB does not support mxfp8 scaling; use one of delayed, tensorwise, blockwise"
    ]
    lowest = ("precision=nvfp4", "precision_plan.rules=[head bf16]")
    assert errors(*words, *lowest) == [
        "precision_plan: H100-80GB does not support nvfp4 scaling; use one of delayed, tensorwise, blockwise"
    ]
    assert not errors(*words, *lowest, "cluster.node.fp8=[blockwise, mxfp8, nvfp4]")
    assert not errors(*words, *lowest, "model.backend=local"), "simulated on any GPU"


def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/bin")
    words = ("recipe=domyn_small/cpt", "cluster=leonardo")

    found = errors(*words, "cluster.container.image=/no.sif", paths=True)
    packs = errors("recipe=domyn_small/sft", "cluster=leonardo", paths=True)
    hub = errors(*words, "data.tokenizer.path=domyn/small", paths=True)

    for said in (
        "data/domyn_cpt/sft_style_train.idx and 61 others not found; `nemo-ext tokenize` writes it",
        "megatron.pretrained_checkpoint=runs/domyn_small/foundation-domyn_small_10b/checkpoints: not found",
        "cluster.container.runtime=singularity is not on PATH",
        "cluster.container.image=/no.sif: no such file",
        "data/domyn_cpt/tokenizer: no such folder",
    ):
        assert any(said in text for text in found), said
    assert any("data/domyn_small/sft/train.idx and 1 other not found; `nemo-ext sft_data`" in text for text in packs)
    assert any("hf download domyn/small" in text for text in hub)


def test_existing_packs_are_found(tmp_path: Path) -> None:
    """Their files are checked, as a prefix itself is not a file."""
    words = (
        "cluster=leonardo",
        "recipe=domyn_small/sft",
        f"data.packed.train={tmp_path}/train",
        "data.packed.valid=null",
    )

    assert any(f"{tmp_path}/train.idx not found" in text for text in errors(*words, paths=True))
    (tmp_path / "train.idx").touch()
    assert not any("train.idx" in text for text in errors(*words, paths=True))


def test_errors_are_reported_before_slurm_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/bin")

    assert submit(["recipe=domyn_small/cpt", "cluster=leonardo"], dry_run=False) == 2
    assert "not submitted: fix the errors first" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_slurm_submit_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(programs))

    with pytest.raises(ValueError, match="sbatch is not on PATH"):
        checked(planned(["recipe=nemotron3_nano/quickstart", "data=mock", "cluster=testbed"]))


def test_a_site_of_the_user(tmp_path: Path) -> None:
    facts = yaml.safe_load((Path(hydra_conf.__file__).parent / "cluster" / "dgx_h100.yaml").read_text())
    (tmp_path / "cluster").mkdir()
    text = "# @package cluster\n" + yaml.safe_dump({**facts, "name": "mine", "partition": "gpu"})
    (tmp_path / "cluster" / "mine.yaml").write_text(text)

    submission = planned(["--config-dir", str(tmp_path), "cluster=mine", "recipe=olmo1/1b"])

    assert "--partition=gpu" in submission.command()
    assert submission.command().count(f"--config-dir={tmp_path}") == 1
    with pytest.raises(ValueError, match="cluster=mine: no such cluster"):
        settings_of(["cluster=mine"])
    with pytest.raises(ValueError, match="no such folder; name a folder"):
        planned(["--config-dir=nowhere", "recipe=olmo1/1b"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=olmo1/1b", "cluster=leonrdo"], "no such cluster: did you mean 'leonardo'"),
        (["recipe=olmo1/7", "cluster=leonardo"], "no such recipe: did you mean 'olmo1/7b'"),
        (["job=trian", "cluster=leonardo"], "job=trian cannot be submitted: did you mean 'train'"),
        (["slurm.shards=4", "cluster=leonardo"], "slurm.shards=4: job=train cannot be sharded"),
        (["job=curate", "slurm.shards=4", "input=a.jsonl", "output=o"], "curate.stages is empty: choose a preset"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        planned(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job=tokenize"], "no text is given: set input=FILE and output=PREFIX"),
        (["job=tokenize", "data=domyn_cpt"], "no stream of this blend has a source"),
        (["job=sft_data", "preset=domyn", "output=x"], "sources is empty: set sources="),
        (["job=preference_data", "output=x"], "sources is empty"),
        (["job=curriculum", "output=x"], "set rollouts"),
        (["job=quantize", "from=here", "to=x", "calibration.data=d"], "precision_plan=null"),
        (["job=quantize", "from=here", "to=x", "precision=fp8_current"], "calibration.data=null"),
        (["job=puzzle", "puzzle.stages=[serch]"], "unknown stage 'serch' in puzzle.stages: did you mean 'search'"),
        (["job=puzzle", "launcher.nodes=3"], "puzzle.distill.batch=4 is not divisible by the 3 ranks"),
        (["job=puzzle", "data=packed", "data.packed.valid=null"], "data.packed.valid=null, but puzzle compares models"),
        (
            ["job=sensitivity", "sensitivity.model=m", "data=packed", "data.packed.valid=null"],
            "null, but sensitivity compares models",
        ),
        (["job=rl", "preset=rl_zero", "model=m"], "tasks.train=null: set tasks.train.path=FILE"),
        (
            ["job=rl", "preset=rl_zero", "model=m", "tasks.train.path=t"],
            "rl.schedule.steps=null: set it, as the preset's source (OLMo 3, RL-Zero) states no",
        ),
        (
            ["job=rl", "preset=rl_zero", "engine=nemo_rl", "model=m", "tasks.train.path=t"],
            "set NEMO_RL_ROOT to its checkout",
        ),
    ],
)
def test_other_jobs_are_checked_too(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)

    assert any(said in text for text in errors("cluster=leonardo", *words))


def test_experts_in_fp8_under_another_default_are_refused_before_submission() -> None:
    words = ("precision=fp8_current", "precision_plan.default=bf16", "precision_plan.rules=[E.fc1 fp8]")
    said = errors("model=nemotron3_nano_tiny", "cluster=dgx_h100", *words)

    assert any("pads the tokens of experts" in text for text in said)


def test_packs_on_a_gpu_that_needs_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("recipe=domyn_small/sft", "cluster=leonardo", "account=X")
    monkeypatch.setattr(packed_attention, "installed", lambda name: None)

    def said(*more: str) -> list[str]:
        submission = planned([*words, *more])
        found = findings(submission.config, submission.settings, paths=True)
        return [one.kind for one in found if "pip install --no-build-isolation flash-attn" in one.text]

    assert said() == ["error"] and said("cluster=dgx_h100") == []
    assert said("cluster.container.image=nemo.sif") == ["warning"]
    monkeypatch.setattr(packed_attention, "installed", lambda name: Version("2.20"))
    assert said() == []


def test_help_names_every_job(command: Callable[..., Any]) -> None:
    said = " ".join(command("submit", "--help").stdout.split())
    others = [job.name for job in jobs() if job.script and job.name != "train"]
    assert f"job train (default), {', '.join(others)} pipeline" in said


def row(recipe: str) -> str:
    """Line of a recipe in docs/clusters.md, with the memory from its rehearsal."""
    rehearsals = json.loads((REPOSITORY / "tests/rehearsal/recipes.json").read_text())
    peak = max(rank["peak_bytes"] for rank in rehearsals[recipe]["ranks"])
    cells = []
    for site in SITES:
        submission = planned([f"recipe={recipe}", f"cluster={site}"])
        launcher: dict[str, Any] = submission.config["launcher"]
        found = findings(submission.config, submission.settings, paths=False)
        wrong = [one.text.partition(": the quality of service ")[2] for one in found if one.kind == "error"]
        cell = f"{launcher['nodes']} x {launcher['nproc_per_node']}, {peak / (1 << 30):.0f} GiB"
        cells.append(cell + (f": refused, {'; '.join(wrong)}".replace(f" of {site}", "") if wrong else ""))
    return f"| {recipe} | {' | '.join(cells)} |"


@pytest.mark.deep
def test_the_page_lists_where_recipes_fit() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text()

    for recipe in [name for name in RECIPES if not name.startswith("puzzle/")]:
        assert row(recipe) in page, f"docs/clusters.md should have\n{row(recipe)}"


def test_a_run_of_the_complete_recipe_composes_the_same() -> None:
    """The submitted config is the one `nemo-ext train` would run on the same nodes."""
    submission = planned(["recipe=domyn_small/cpt", "cluster=leonardo", "run_dir=r"])

    assert submission.config == compose("train", ["recipe=domyn_small/cpt", "run_dir=r", "operation=cluster"])


@pytest.mark.parametrize("key", ["distillation.teacher", "megatron.logits_load_dir"])
def test_a_teacher_made_by_an_earlier_job_may_be_missing(key: str, tmp_path: Path) -> None:
    config = compose("train", ["run_dir=unused", "data=mock", "model=llama_nemotron_tiny", f"{key}={tmp_path}/teacher"])

    assert by_megatron(config, [tmp_path / "teacher"]) == []
    (found,) = by_megatron(config, [tmp_path / "other"])
    assert f"{key}={tmp_path}/teacher: no such directory" in found.text


def test_passes_of_curation_are_arrays_that_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def call(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, f"{40 + len(asked)}\n", "")

    monkeypatch.setattr(submit_module, "call", call)
    monkeypatch.chdir(tmp_path)
    words = ["job=curate", "slurm.shards=3", "input=a.jsonl", "output=o", "preset=dolma", "cluster=leonardo"]
    submission = planned(words)
    job = hand_over(submission)
    assert job == "44" and submission.rounds == 4
    waits = [[word for word in command if word.startswith("--dependency")] for command in asked]
    assert waits == [[], *([f"--dependency=afterok:{number}"] for number in (41, 42, 43))]
    assert all("--array=0-2" in command for command in asked)
    records = [word for command in asked for word in command if word.startswith("slurm.folder=")]
    assert records == [f"slurm.folder=runs/slurm/curate-o/rounds/{number}" for number in (1, 2, 3)]
    assert (tmp_path / "runs/slurm/curate-o/rounds/2/shards/1/slurm/job").read_text() == "42_1\n"
    assert (tmp_path / "runs/slurm/curate-o/shards/2/slurm/job").read_text() == "44_2\n"


@pytest.mark.parametrize("runs", ["runs=[r/a,r/b]", "runs={before: r/a, after: r/b}"])
def test_a_comparison_waits_for_its_runs(runs: str) -> None:
    config = compose("compare", [runs, "output=o"])

    assert [(read.key, read.path) for read in find("compare").inputs(config)] == [
        ("runs", Path("r/a")),
        ("runs", Path("r/b")),
    ]
    assert makes("compare", config) == [Path("o")]
