"""Commands by name, and a job that another installed package adds."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from nemo_ext.job.job import Job
from nemo_ext.job.registry import command, commands, jobs, with_config

Run = Callable[..., subprocess.CompletedProcess[str]]

FILES = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mine"
version = "1.0"
[project.entry-points."nemo_ext.jobs"]
count_words = "mine.commands:COUNT_WORDS"
train = "mine.commands:COUNT_WORDS"
broken = "mine.nowhere:BROKEN"
newer = "mine.newer:NEWER"
[project.entry-points."nemo_ext.configs"]
mine = "mine.conf"
absent = "mine.absent"
module = "mine.counting"
[project.entry-points."nemo_ext.environments"]
rhymes = "mine.rhymes"
[tool.setuptools]
packages = ["mine", "mine.conf"]
package-data = {"*" = ["**/*.yaml"]}
""",
    "mine/__init__.py": "",
    "mine/conf/__init__.py": "",
    "mine/conf/recipe/few.yaml": "# @package _global_\nwords: few\n",
    "mine/conf/recipe/mine/short.yaml": "# @package _global_\nmegatron: {train_iters: 3}\n",
    "mine/conf/pipeline/rivers.yaml": (
        "# @package _global_\npipeline: rivers\n"
        "stages: {bytes: {job: byte_tokenizer, words: ['output=${run_dir}/b']}}\n"
    ),
    "mine/conf/benchmark/rivers.yaml": "{about: rivers, like: letters}\n",
    "mine/conf/benchmark/letters.yaml": "about: not used, as nemo_ext has a benchmark with this name\n",
    "mine/newer.py": "from nemo_ext.job.job import Job\nNEWER = Job(name='newer', attribute=1)\n",
    "mine/conf/count_words.yaml": """
defaults:
  - _self_
  - optional recipe: null
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled
input: ???
output: ???
words: all
hydra: {run: {dir: .}, output_subdir: null, job: {chdir: false}}
""",
    "mine/commands.py": """
from nemo_ext.job.job import Grammar, Job, inputs
from nemo_ext.job.settings import Place

COUNT_WORDS = Job(
    name="count_words",
    group="data",
    help="count the words of a text file",
    run="mine.counting:run",
    configs="mine.conf",
    inputs=lambda config: inputs(("input", config["input"], "name a file")),
    script="task",
    grammar=Grammar(settings={"input": Place, "output": Place}),
)
""",
    "mine/rhymes.py": """
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

def environment(letters: int = 2):
    def verify(response, word):
        return Verdict.correct() if response.answer[-letters:] == word[-letters:] else Verdict.wrong("no rhyme")

    return Environment(name="rhymes", check=lambda reference: reference["word"], verify=verify)
""",
    "mine/counting.py": """
from pathlib import Path

def run(config):
    text = Path(config["input"]).read_text()
    if not text:
        raise ValueError(f"input={config['input']}: is empty: name a text")
    Path(config["output"]).mkdir()
    Path(config["output"], "count").write_text(str(len(text.split())))
""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `nemo-ext` where a package with a job is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--offline", "--python", sys.executable, "--target", site, source], check=True)
    path = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])

    def run(*words: str, cwd: Path, module: Sequence[str] = ("-m", "nemo_ext")) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *module, *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_another_packages_job_is_listed_and_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a=b, c.txt").write_text("one two three")

    listed = run("--help", cwd=tmp_path)
    ended = run("count_words", "input=a=b, c.txt", "output=o", cwd=tmp_path)

    assert "count_words        count the words of a text file" in listed.stdout
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "o" / "count").read_text() == "3"


def test_its_mistakes_are_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")

    wrong = run("count_words", "input=empty", "output=o", cwd=tmp_path)
    unknown = run("count_words", "inptu=empty", "output=o", cwd=tmp_path)

    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (2, "error: input=empty: is empty: name a text")
    assert unknown.returncode == 2
    assert "count_words has no such key; `nemo-ext count_words --help` lists its keys: did you mean 'input'?" in (
        unknown.stderr
    )


def test_its_groups_and_options_are_those_of_any_job(run: Run, tmp_path: Path) -> None:
    shown = run("count_words", "input=a", "output=o", "recipe=few", "--cfg", "job", cwd=tmp_path)
    unknown = run("count_words", "input=a", "output=o", "recipe=fww", cwd=tmp_path)

    assert "words: few" in shown.stdout, shown.stderr
    assert "error: recipe=fww: no such recipe: did you mean 'few'" in unknown.stderr


def test_another_packages_recipes_pipelines_and_benchmarks_are_used(run: Run, tmp_path: Path) -> None:
    script = (
        "from nemo_ext.evaluation.benchmark import names, read_benchmark\n"
        "print('rivers' in names('benchmark'), read_benchmark('rivers').about, read_benchmark('rivers').environment)\n"
        "print(read_benchmark('letters').about)"
    )

    recipe = run("train", "recipe=mine/short", "run_dir=r", "--cfg", "job", "-p", "megatron.train_iters", cwd=tmp_path)
    typo = run("train", "recipe=mine/shrot", "run_dir=r", "--cfg", "job", cwd=tmp_path)
    pipeline = run("pipeline", "pipeline=rivers", "run_dir=r", cwd=tmp_path)
    benchmark = run("-c", script, cwd=tmp_path, module=())

    assert recipe.stdout == "3\n", recipe.stderr
    assert "did you mean 'mine/short'" in typo.stderr
    assert (tmp_path / "r" / "b").is_dir(), pipeline.stderr
    assert benchmark.stdout == ("True rivers multiple_choice\nthe questions of `choice`, answered with a letter\n"), (
        benchmark.stderr
    )
    assert "entry point absent = mine.absent in nemo_ext.configs (package mine) is ignored" in benchmark.stderr


def test_it_is_used_in_a_pipeline_and_submitted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "pipeline").mkdir(parents=True)
    (tmp_path / "mine" / "pipeline" / "words.yaml").write_text(
        "# @package _global_\npipeline: words\nstages:\n"
        "  first: {job: count_words, words: [input=a.txt, 'output=${run_dir}/counts']}\n"
        "  second: {job: count_words, words: ['input=${run_dir}/counts/count', 'output=${run_dir}/again']}\n"
    )
    (tmp_path / "a.txt").write_text("one two")
    words = ["--config-dir=mine", "pipeline=words", "run_dir=run"]

    ended = run("pipeline", *words, cwd=tmp_path)
    submitted = run("submit", "--dry-run", "job=count_words", "input=a.txt", "output=x", cwd=tmp_path)
    missing = run("submit", "--dry-run", "job=count_words", "input=b.txt", "output=x", cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "again" / "count").read_text() == "1"
    assert "first" in (tmp_path / "run" / "report.md").read_text()
    assert "task.sbatch count_words input=a.txt output=x" in submitted.stdout
    assert "error: input=b.txt: not found; name a file" in missing.stdout


def test_a_broken_package_does_not_affect_other_commands(run: Run, tmp_path: Path) -> None:
    """A name that is already used, or an entry point that cannot be imported."""
    listed = run("--help", cwd=tmp_path)
    ours = run("byte_tokenizer", "output=bytes", cwd=tmp_path)
    broken = run("broken", cwd=tmp_path)

    assert "  train              train a model with Megatron's own trainer" in listed.stdout
    assert listed.stderr.splitlines() == [
        "entry point train = mine.commands:COUNT_WORDS in nemo_ext.jobs (package mine) is ignored, as "
        "nemo_ext.megatron.commands:TRAIN has the same name; rename it",
        "entry point broken = mine.nowhere:BROKEN in nemo_ext.jobs (package mine) cannot be imported (No module named "
        "'mine.nowhere'); update or uninstall its package",
        "entry point newer = mine.newer:NEWER in nemo_ext.jobs (package mine) cannot be imported (Job.__init__() got "
        "an unexpected keyword argument 'attribute'); update or uninstall its package",
    ]
    assert ours.returncode == 0
    assert ours.stderr == (
        "entry point absent = mine.absent in nemo_ext.configs (package mine) is ignored: mine.absent is not a package "
        "with an __init__.py\n"
        "entry point module = mine.counting in nemo_ext.configs (package mine) is ignored: mine.counting is not a "
        "package with an __init__.py\n"
    )
    assert (broken.returncode, broken.stderr.count("cannot be imported")) == (2, 1)


def test_another_packages_environment_verifies(run: Run, tmp_path: Path) -> None:
    script = (
        "from nemo_ext.rl.environments import make, known_environments\n"
        "from nemo_ext.chat.response import parse_response\n"
        "rhymes = make('rhymes', {'letters': 2})\n"
        "verdict = rhymes.verify(parse_response('hat'), rhymes.check({'word': 'cat'}))\n"
        "print('math' in known_environments(), verdict.outcome)"
    )

    assert run("-c", script, cwd=tmp_path, module=()).stdout == "True correct\n"


def test_every_command_is_complete() -> None:
    """References can be imported, and configs exist."""
    for each in commands():
        references = [each.main, each.grammar.literal]
        if isinstance(each, Job):
            references += [each.run, each.check, each.findings, each.started, each.size, each.figures]
            assert with_config(each.config or each.name) is each
        for reference in filter(lambda given: isinstance(given, str), references):
            module, _, name = str(reference).partition(":")
            assert callable(getattr(import_module(module), name)), reference


def test_jobs_that_are_submitted_have_a_script() -> None:
    scripts = Path(__file__).parents[2] / "slurm"

    assert {job.script for job in jobs() if job.script} == {path.stem for path in scripts.glob("*.sbatch")}


def test_an_unknown_command_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="there is no job 'tokenise': did you mean 'tokenize'"):
        command("tokenise")
