"""Pipelines: jobs composed from a pipeline's file, and a chain on a real Slurm."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.job.job import will_exist
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import last_checkpoint
from nemo_ext.pipeline.stages import read
from nemo_ext.pipeline.submit import model_to_come, submit
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import makes
from nemo_ext.slurm.preflight import Finding, findings
from nemo_ext.slurm.settings import split
from nemo_ext.slurm.submit import planned
from tests.composing import write_pipeline

REPOSITORY = Path(__file__).parents[2]
PIPELINES = sorted(path.stem for path in (Path(hydra_conf.__file__).parent / "pipeline").glob("*.yaml"))


GENRM = [f"genrm_data.sources.{name}.path=/given/{name}" for name in ("arena", "helpsteer3", "safety")]


def needed(name: str) -> list[str]:
    """Words for the keys that a pipeline leaves to the user."""
    keys = yaml.safe_load((Path(hydra_conf.__file__).parent / "pipeline" / f"{name}.yaml").read_text())
    return [
        f"{key}={7 if key.endswith('steps') else f'/given/{key}'}" for key, value in keys.items() if value == "???"
    ] + (GENRM if name == "nemotron3_nano" else [])


def words_of(name: str, stage: str, *words: str) -> tuple[str, ...]:
    found = read([f"pipeline={name}", "run_dir=r", *needed(name), *words])
    return next(each.words for each in found.stages if each.name == stage)


LARGE = (
    "nemotron3_nano",
    "llama_nemotron_nano",
    "llama_nemotron_super",
    "llama_nemotron_ultra",
    "olmo1",
    "olmo3_7b",
    "olmo3_32b",
    "puzzle",
)
STAGES = {
    "domyn_small": [
        *("tokenize", "sft_data", "annealing_data", "cpt", "sft", "annealing", "export", "math_grpo", "dpo", "grpo"),
        *("yarn", "evaluate_yarn", "serve"),
    ],
    "reprofile": ["rollouts", "curriculum", "grpo", "rollouts_2", "curriculum_2", "grpo_2"],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in PIPELINES])
def test_every_stage_of_every_pipeline_composes_and_reads_what_one_before_it_writes(name: str) -> None:
    """An input may also be given by the user."""
    pipeline = read([f"pipeline={name}", *needed(name), "run_dir=r", "cluster=leonardo"])
    submissions = {stage.name: planned(stage.words) for stage in pipeline.stages}

    for stage in pipeline.stages:
        submission = submissions[stage.name]
        assert submission.command()[0] == "sbatch"
        different = set(split(submission.words)[1]) ^ set(stage.own)
        assert all(word.startswith(("launcher.", "operation=")) for word in different), (
            "as `nemo-ext pipeline` notes what it finished"
        )
        assert f"--config-dir={REPOSITORY}" not in stage.words
        if name in STAGES:
            before = [
                place
                for each in pipeline.before(stage)
                for place in makes(submissions[each.name].settings.job, submissions[each.name].config)
            ]
            for entry in find(submission.settings.job).inputs(submission.config):
                there = will_exist(entry.path, before) or str(entry.path).startswith("/given/")
                assert there, f"{stage.name}: {entry.key}={entry.path}"


@pytest.mark.parametrize("name", STAGES)
def test_the_stages_of_a_pipeline(name: str) -> None:
    found = read([f"pipeline={name}", "run_dir=r", "cluster=leonardo", "evaluate=null", *needed(name)]).stages

    assert [stage.name for stage in found] == STAGES[name]


MINE = """\
# @package _global_
pipeline: mine
stages:
  a: {job: train, words: [recipe=olmo1/1b]}
  b: {job: train, after: [], words: [recipe=olmo1/1b]}
  soup: {job: merge, after: [a, b], words: ["from=[r/a/checkpoints,r/b]", to=r/soup_model]}
  export: {job: convert, parent: soup, words: [to=r/hf]}
  grpo: {job: rl, parent: export, words: &rl [preset=rl_zero, engine=nemo_rl, tasks.train.path=t, rl.schedule.steps=5]}
  again: {job: rl, parent: grpo, words: *rl}
  large: {job: train, after: [], words: [recipe=olmo1/7b]}
  large_export: {job: convert, parent: large, words: [to=r/large_hf]}
  own:
    job: rl
    parent: export
    words: [preset=rl_zero, engine=nemo_rl, tasks.train.path=t, rl.schedule.steps=5, model=r/large_hf]
  kd:
    job: train
    after: []
    words: [recipe=llama_nemotron/super_kd, megatron.pretrained_checkpoint=r/c, train.model_of_start=true]
  child: {job: convert, parent: kd, words: [to=r/child/hf]}
  of_child: {job: rl, parent: child, words: *rl}
"""


def test_the_layout_of_rl_is_checked_by_the_training_above_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "mine.yaml").write_text(MINE)
    pipeline = read([f"--config-dir={tmp_path}", "pipeline=mine", "run_dir=r", "cluster=dgx_h100"])
    submissions = {stage.name: planned(stage.words) for stage in pipeline.stages}

    def of(name: str, *without: str) -> Any:
        return model_to_come(
            submissions[name], [each for key, each in submissions.items() if key not in (name, *without)]
        )

    grpo = submissions["grpo"]
    assert of("grpo") == of("again") and of("grpo")["num_hidden_layers"] == 16
    assert of("grpo", "a") == of("grpo"), "both of an average are alike"
    assert [of("grpo", "a", "b"), of("again", "soup"), of("again", "grpo"), of("export")] == [None] * 4
    assert of("of_child") is None, "a search chooses the model"
    assert of("own")["hidden_size"] == 4096, "the user's own word is what it starts from"

    monkeypatch.setenv("NEMO_RL_ROOT", str(tmp_path))
    asked: list[Any] = []

    def on_nemo_rl(config: Any, *others: Any) -> list[Finding]:
        asked.append(json.loads((Path(config["policy"]) / "config.json").read_text()))
        return []

    monkeypatch.setattr("nemo_ext.rl.preflight._on_nemo_rl", on_nemo_rl)
    said = [findings(grpo.config, grpo.settings, model_to_come=model) for model in (of("grpo"), None)]

    assert asked == [of("grpo")]
    assert ["when the job starts" in str(found) for found in said] == [False, True]


def test_words_reach_the_stages_they_name() -> None:
    given = ("train.scale=laptop", "cpt.megatron.lr=1e-5", "cluster=leonardo", "sft.cluster.qos=boost_qos_bprod")
    cpt, sft, export = (words_of("domyn_small", stage, *given) for stage in ("cpt", "sft", "export"))

    assert {"scale=laptop", "megatron.lr=1e-5", "cluster=leonardo", "run_dir=r/cpt"} < set(cpt)
    assert {"scale=laptop", "cluster.qos=boost_qos_bprod", "run_dir=r/sft"} < set(sft)
    assert not {"megatron.lr=1e-5", "cluster.qos=boost_qos_bprod"} & {*export, *(set(sft) & set(cpt))}
    assert "slurm.folder=r/export" in export
    assert "data=mine" in words_of("domyn_small", "tokenize", "tokenize.data=mine")
    assert "data=domyn_cpt" not in words_of("domyn_small", "tokenize", "tokenize.data=mine"), "the last word counts"
    assert "slurm.nodes=2" in words_of("domyn_small", "grpo", "slurm.nodes=2"), "over the pipeline's own"


def test_only_outputs_of_stages_may_be_missing(tmp_path: Path) -> None:
    coming = makes("tokenize", compose("tokenize", ["data=local_text", f"data_root={tmp_path}"]))
    one = makes("tokenize", compose("tokenize", ["input=a.jsonl", f"output={tmp_path}/mine"]))

    assert all(will_exist(Path(f"{place}_train.idx"), coming) for place in coming)
    assert not will_exist(coming[0].parent / "other_train.idx", coming)
    assert will_exist(tmp_path / "mine_train.idx", one)
    assert not will_exist(tmp_path / "mine2_train.idx", one)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipeline=domin_small"], "pipeline=domin_small: no such pipeline: did you mean 'domyn_small'"),
        (["pipeline=domyn_small"], "not set: environment_tasks, math_tasks, pairs, start, tokenizer"),
        (
            ["pipeline=quickstart", "pretrian.megatron.lr=1"],
            "no stage or job is called pretrian: did you mean 'pretrain'",
        ),
        (["pipeline=quickstart", "skip=[export,tokenise]"], "skip=tokenise: no such stage: did you mean 'tokenize'"),
        (["pipeline=mine"], "stages.b.after=c: no such stage: known: a, b"),
        (["pipeline=other"], "stages.a: unknown key 'word': did you mean 'words'"),
        (["pipeline=third"], "job=trian cannot be submitted: did you mean 'train'"),
        (["pipeline=quickstart", "rl.rl.batch=7"], "no stage or job is called rl"),
        (
            ["pipeline=quickstart", "slurm.shards=2"],
            "slurm.shards=2 can only be set for a single stage: write STAGE.slurm.shards=2",
        ),
        (["pipeline=quickstart", "run_dir=null"], "run_dir=null: set it to a directory"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, words: list[str], said: str) -> None:
    stages = {
        "mine": {"a": {"job": "train", "words": []}, "b": {"job": "train", "words": [], "after": ["c"]}},
        "other": {"a": {"job": "train", "word": []}},
        "third": {"a": {"job": "trian", "words": []}},
    }
    for name, given in stages.items():
        write_pipeline(tmp_path, name, given)

    with pytest.raises(ValueError, match=r"\w") as raised:
        read([f"--config-dir={tmp_path}", *words])
    assert said in str(raised.value)


def test_findings_are_printed_once_with_their_stages(
    tmp_path: Path, programs: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    programs(squeue="")
    words = [f"from={tmp_path}/nowhere"]
    stages = {name: {"job": "convert", "words": [*words, f"to={tmp_path}/{name}"]} for name in ("a", "b-2")}
    write_pipeline(tmp_path, "two", stages)

    given = ["pipeline=two", f"--config-dir={tmp_path}", f"run_dir={tmp_path}/r", "cluster=leonardo"]
    assert submit(given, dry_run=True) == 2

    lines = capsys.readouterr().out.splitlines()
    (error,) = (line for line in lines if line.startswith("error: "))
    assert error == f"error: from={tmp_path}/nowhere: not found; name a checkpoint (a, b-2)"
    assert lines.index(error) == len(lines) - 2
    first, second = (line for line in lines if "sbatch --parsable" in line)
    assert first.startswith("a=$(mkdir -p ") and second.startswith("b_2=$(mkdir -p ")
    assert '"--dependency=afterok:$a"' in second

    programs(squeue="echo 'squeue: fatal: no controller' >&2; exit 1")
    assert submit(given, dry_run=True) == 2
    error = "Slurm's queue cannot be read (squeue: fatal: no controller); try again once `squeue` works"
    assert f"error: {error} (the queue)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no controller"):
        submit(given, dry_run=False)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_chain_stops_at_a_failure_and_resumes_there(
    slurm: Any, here: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(f'{{"text": "{number} {"word " * 200}"}}\n' for number in range(200)))
    tiny = [
        *("recipe=nemotron3_nano/quickstart", "data=local_text", f"data.directory={tmp_path}/data"),
        "data.streams=[{name: mine, weight: 1}]",
        *("megatron.seq_length=64", "megatron.micro_batch_size=1", "megatron.global_batch_size=2"),
        *("train.tokens=1280", "megatron.eval_iters=1", "megatron.eval_interval=1000"),
    ]
    last = tmp_path / "tasks.jsonl"
    stages = {
        "tokenize": {"job": "tokenize", "words": [f"input={text}", f"output={tmp_path}/data/mine"]},
        "pretrain": {"job": "train", "words": tiny},
        "last": {"job": "rl_tasks", "words": ["generator=arithmetic", "count=5", f"output={last}"]},
    }
    write_pipeline(tmp_path, "three", stages)
    root = tmp_path / "chain"

    def submit(*words: str, code: int = 0) -> str:
        given = ("pipeline=three", f"--config-dir={tmp_path}", f"run_dir={root}", "cluster=testbed")
        return here("submit", *given, *words, code=code)

    def job(stage: str) -> str:
        return (root / stage / "slurm" / "job").read_text().strip()

    assert '"--dependency=afterok:$tokenize"' in submit("--dry-run")
    assert not root.exists()
    standin(fails=True)
    submit("pretrain.slurm.max_idle=1")
    first = [job(stage) for stage in stages]

    assert [slurm.end_of(each, root) for each in first] == ["COMPLETED", "FAILED", "CANCELLED"], slurm.outputs(root)
    told = [line for line in here("status", str(root)).splitlines() if str(root) in line]
    assert ["finished" in told[0], "(a rank failed (exit" in told[2 if "last" in told[1] else 1]] == [True, True], told
    assert "not started: pretrain is stopped: " in "".join(told)

    standin(fails=False)
    assert "tokenize: finished before" in submit()
    second = [job(stage) for stage in stages]
    assert second[0] == first[0]
    assert f"pretrain: job {second[1]} is " in submit(), "a second command leaves alone what waits or runs"

    assert [slurm.end_of(each, root) for each in second[1:]] == ["COMPLETED"] * 2, slurm.outputs(root)
    assert last_checkpoint(root / "pretrain") == 10
    assert last.is_file()
    assert attempts.finished(root / "last") is not None
    assert submit().count("finished before") == 3
    assert "finished with other arguments (megatron.lr=1.0)" in submit("pretrain.megatron.lr=1.0", code=2)


@pytest.mark.deep
@pytest.mark.slurm
def test_a_block_library_is_distilled_by_an_array(slurm: Any, here: Callable[..., str], tmp_path: Path) -> None:
    root = tmp_path / "small"
    small = (
        *("data=mock", 'model.pattern="(*-)x2"', "megatron.hidden_size=64", "megatron.ffn_hidden_size=96"),
        *("megatron.seq_length=32", "megatron.micro_batch_size=4", "megatron.global_batch_size=4", "train.tokens=1024"),
        *("puzzle.calibration={sequences: 8, batch: 2}", "puzzle.evaluation={sequences: 8, batch: 2}"),
        *("puzzle.distill={steps: 4, batch: 2}", "puzzle.heal.tokens=0", "puzzle.baselines=false"),
        *("puzzle.search.shares={memory_bytes: 0.8}", "puzzle.search.sweep.resource=null"),
    )
    words = ("pipeline=puzzle", "shards=2", f"run_dir={root}", "cluster=testbed", *(f"puzzle.{word}" for word in small))
    assert "--array=0-1" in here("submit", *words, 'slurm.options=["--cpus-per-task=1"]')
    last = (root / "child" / "slurm" / "job").read_text().strip()

    assert slurm.end_of(last, root, seconds=480) == "COMPLETED", slurm.outputs(root)
    assert all(attempts.finished(root / "distill" / "shards" / number) is not None for number in "01")
    assert (root / "puzzle" / "child" / "report.md").is_file()
