"""`nemo-ext mixture`: runs in shards, the optimum, its data file and report."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from nemo_ext.data.streams import blend_to_tokenize
from nemo_ext.data.tokenize import tokenize_blend
from nemo_ext.evaluation.generators import sources
from nemo_ext.job.config import FAILED, INTERRUPTED, USER_ERROR, compose
from nemo_ext.mixture import job
from nemo_ext.mixture.law import Law
from nemo_ext.slurm import attempts
from nemo_ext.slurm.preflight import findings
from nemo_ext.slurm.submit import planned

LAWS = {
    "python_bits": Law(np.log(0.5), np.array([0.6, -0.7])),
    "docstring_bits": Law(np.log(0.4), np.array([-0.1, 0.3])),
}
EVALUATE = "evaluate=suite=quick evaluate.benchmarks=[python_bits,docstring_bits] evaluate.limit=2 serving.device=cpu"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the modules of the standard library from which benchmarks are made, since each check reads all of them."""
    names = ("argparse", "difflib", "doctest", "heapq", "pickletools", "statistics", "tarfile", "threading")
    monkeypatch.setattr(sources, "_in_random_order", lambda folder, seed: tuple(folder / f"{n}.py" for n in names))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two streams, tokenised: web of 60,000 tokens and code of 20,000."""
    folder = tmp_path_factory.mktemp("data")
    for name, line, count in (
        ("web", "a page with words, number {}", 2000),
        ("code", "def f{0}(x): return {0} + x", 800),
    ):
        (folder / f"{name}.txt").write_text("\n\n".join(line.format(number) for number in range(count)))
        words = [f"input={folder}/{name}.txt", f"output={folder}/{name}", "tokenizer=byte", "workers=1"]
        tokenize_blend(blend_to_tokenize(compose("tokenize", words)), progress=False)
    return folder


@pytest.fixture
def words(data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of the job, followed by further ones."""

    both = "[{name: web, weight: 1}, {name: code, weight: 1}]"

    def made(*more: str, tokens: str = "2e4", streams: str = both) -> list[str]:
        train = (
            f"train=model=olmo3_tiny scale=laptop data_root={data} data.tokenizer={{kind:byte}} train.tokens={tokens}"
        )
        return [f"{train} 'streams={streams}'", EVALUATE, f"output={tmp_path}/mix", *more]

    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the started runs; their losses are computed by laws instead of training."""
    names: list[str] = []

    def run(given: Sequence[str], *, dry_run: bool) -> int:
        found = dict(word.split("=", 1) for word in given)
        folder, name = Path(found["run_dir"]), found["pipeline"]
        names.append(name)
        file = yaml.safe_load((Path(found["--config-dir"]) / "pipeline" / f"{name}.yaml").read_text())
        streams = file["stages"]["train"]["words"][-1].removeprefix("streams=")
        weights = {each["name"]: each["weight"] for each in yaml.safe_load(streams)}
        shares = np.array([weights.get(each, 0) for each in ("web", "code")])
        benchmarks = {
            task: {"metric": "bits_per_byte", "accuracy": float(law.at(shares))} for task, law in LAWS.items()
        }
        benchmarks["accuracy"] = {"metric": "accuracy", "accuracy": 0.1}
        stage = folder / next(each for each in file["stages"] if each.startswith("evaluate_"))
        stage.mkdir(parents=True)
        (stage / "results.json").write_text(json.dumps({"benchmarks": benchmarks}))
        attempts.finish(stage, step=None, words=[])
        return 0

    monkeypatch.setattr(job, "run_pipeline", run)
    return names


def test_the_optimum_is_found_trained_and_written(
    words: Callable[..., list[str]], ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(compose("mixture", words("mixture.runs=12", "mixture.kl=0.01")))

    assert ran[:-1] == ["prior", *(f"sample_{number:03d}" for number in range(1, 13))]
    assert ran[-1].startswith("best_")
    found = json.loads((tmp_path / "mix" / "mixture.json").read_text())
    assert found["prior"]["web"] == pytest.approx(found["tokens"]["web"] / sum(found["tokens"].values()))
    shares = np.linspace(0, 1, 1001)
    pairs = np.stack([shares, 1 - shares], axis=1)
    prior = np.array([found["prior"]["web"], found["prior"]["code"]])
    goal = sum(law.at(pairs) for law in LAWS.values()) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        goal = goal + 0.01 * np.nan_to_num(pairs * np.log(pairs / prior)).sum(axis=1)
    assert found["mixture"]["web"] == pytest.approx(shares[goal.argmin()], abs=0.02)
    for task, law in LAWS.items():
        own = found["bits_per_byte"][task]
        assert own["measured"] == pytest.approx(float(law.at(np.array(list(found["mixture"].values())))))
        assert own["predicted"] == pytest.approx(own["measured"], abs=0.01)
    data = yaml.safe_load(text := (tmp_path / "mix" / "conf" / "data" / "mixture.yaml").read_text())["data"]
    assert "measured" in text.splitlines()[1]
    assert {each["name"]: each["weight"] for each in data["streams"]} == pytest.approx(found["mixture"], abs=1e-5)
    trained = compose(
        "train", [f"--config-dir={tmp_path}/mix/conf", "model=olmo3_tiny", "scale=laptop", "data=mixture"]
    )
    assert trained["data"]["tokenizer"] == {"kind": "byte"}
    assert [Path(each["prefix"]).name for each in trained["data"]["streams"]] == ["web", "code"]
    assert "measured" in capsys.readouterr().out
    assert (tmp_path / "mix" / "report.html").exists()


def test_a_run_trains_with_its_mixture(
    words: Callable[..., list[str]], ran: list[str], data: Path, tmp_path: Path
) -> None:
    job.run(compose("mixture", words("mixture.runs=1", "shard=0/2")))

    file = yaml.safe_load((tmp_path / "mix" / "conf" / "pipeline" / f"{ran[0]}.yaml").read_text())
    streams = compose("train", file["stages"]["train"]["words"])["data"]["streams"]
    (record,) = (tmp_path / "mix").rglob("mixtures.json")
    shares = json.loads(record.read_text())[ran[0]]
    assert [(each["name"], each["weight"]) for each in streams] == [("web", shares[0]), ("code", shares[1])]
    assert [Path(each["prefix"]) for each in streams] == [data / "web", data / "code"]


def test_shards_divide_the_runs_and_the_first_finishes_the_job(
    words: Callable[..., list[str]], ran: list[str], tmp_path: Path
) -> None:
    job.run(compose("mixture", words("mixture.runs=5", "shard=0/2")))

    assert ran == ["prior", "sample_002", "sample_004"]
    job.run(compose("mixture", words("mixture.runs=5", "shard=1/2")))
    assert sorted(ran[3:]) == ["sample_001", "sample_003", "sample_005"]
    assert not (tmp_path / "mix" / "mixture.json").exists()
    job.run(compose("mixture", words("mixture.runs=5", "shard=0/2")))
    assert (tmp_path / "mix" / "mixture.json").exists()


def test_a_second_run_does_only_new_work(words: Callable[..., list[str]], ran: list[str], tmp_path: Path) -> None:
    job.run(compose("mixture", words("mixture.runs=6")))
    before = len(ran)

    job.run(compose("mixture", words("mixture.runs=6")))
    assert len(ran) == before
    job.run(compose("mixture", words("mixture.runs=8", "mixture.kl=0.5", "mixture.at_least.code=0.6")))
    assert ran[before : before + 2] == ["sample_007", "sample_008"]
    assert len(ran) == before + 3
    assert json.loads((tmp_path / "mix" / "mixture.json").read_text())["mixture"]["code"] >= 0.6
    job.run(compose("mixture", words("mixture.runs=8", "mixture.seed=7")))
    assert len(ran) == before + 4, (
        "existing samples are kept with another seed; the only new run is the optimum for kl=0.05"
    )
    with pytest.raises(ValueError, match=r"was begun with other settings .*tokens: 20480 -> 40960"):
        job.run(compose("mixture", words(tokens="4e4")))
    with pytest.raises(ValueError, match=r"was begun with other settings \(train: .*streams"):
        job.run(compose("mixture", words(streams="[{name: code, weight: 1}, {name: web, weight: 1}]")))


def test_other_benchmarks_are_evaluated_on_existing_models(
    words: Callable[..., list[str]], ran: list[str], tmp_path: Path
) -> None:
    job.run(compose("mixture", words("mixture.runs=4")))
    other = EVALUATE.replace("python_bits,docstring_bits", "python_bits")

    job.run(compose("mixture", [*words("mixture.runs=4"), other]))

    assert sorted(ran[6:11]) == sorted(ran[:5])
    file = yaml.safe_load((tmp_path / "mix" / "conf" / "pipeline" / "prior.yaml").read_text())
    assert len(list((tmp_path / "mix" / "runs" / "prior").glob("evaluate_*"))) == 2
    assert list(json.loads((tmp_path / "mix" / "mixture.json").read_text())["bits_per_byte"]) == ["python_bits"]
    assert file["stages"]["train"]["words"][-1].startswith("streams=")


def test_missing_answers_are_an_error(words: Callable[..., list[str]], ran: list[str], tmp_path: Path) -> None:
    job.run(compose("mixture", words("mixture.runs=2", "shard=0/2")))
    (results,) = (tmp_path / "mix" / "runs" / "sample_002").glob("evaluate_*/results.json")
    found = json.loads(results.read_text())
    for entry in ({"accuracy": None}, {"accuracy": 1.0, "failed": 3}, {"accuracy": 1.0, "missing": 1}):
        changed = {**found["benchmarks"], "python_bits": found["benchmarks"]["python_bits"] | entry}
        results.write_text(json.dumps({"benchmarks": changed}))

        with pytest.raises(ValueError, match=r"sample_002.*python_bits has .*remove the folder"):
            job.run(compose("mixture", words("mixture.runs=2", "shard=0/2")))


def test_a_failed_run_ends_the_job(words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for code, error in ((FAILED, SystemExit), (USER_ERROR, ValueError), (INTERRUPTED, KeyboardInterrupt)):
        monkeypatch.setattr(job, "run_pipeline", lambda given, *, dry_run, code=code: code)

        with pytest.raises(error):
            job.run(compose("mixture", words()))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["mixture.at_most.cod=0.1"], r"mixture\.at_most: the mixture has no stream 'cod': .*'code'"),
        (
            ["mixture.at_least.code=0.6", "mixture.tokens=1e6"],
            r"mixture\.at_least\.code=0\.6 is above 0\.0\d+, the largest share of 1,000,000 tokens",
        ),
        (["mixture.tokens=1e6"], r"shares cannot sum to 1, .* maximums to 0\.\d+"),
        (["mixture.strengths=[0,1]"], r"mixture\.strengths\.0=0"),
        (["shard=3/2"], "shard: 3/2: expected I/N with I below N"),
        (["mixture.weights.pyhton_bits=2"], r"mixture\.weights: 'pyhton_bits' is not a benchmark .*'python_bits'"),
        (["evaluate=suite=olmo3_base_easy evaluate.data_root=/nowhere"], "/nowhere/ai2_arc"),
        (
            ["evaluate=suite=quick evaluate.benchmarks=[python_bits] evaluate.limit=2 serving.replicas=2"],
            r"evaluate: serving\.replicas must be 1 for a small model, not 2",
        ),
        (["output=it's"], "output=it's: choose a path without '"),
        (["evaluate=suite=nothing"], "nothing"),
        (
            ["evaluate=suite=quick model=x"],
            "evaluate: model cannot be set, since it differs between runs; remove model=x",
        ),
        (["evaluate=suite=quick evaluate.benchmarks=[letters]"], "has no benchmark scored in bits per byte"),
        (["train=model=olmo3_tiny scale=laptop data=mock"], "train: there are no streams to mix"),
        (
            ["train=model=olmo3_tiny scale=laptop data=local_text data_root=/nowhere"],
            "_train.idx does not exist; tokenise the stream",
        ),
        (
            ["train=model=olmo3_tiny scale=laptop launcher.nodes=2 data=local_text"],
            r"train: launcher\.nodes must be 1 for small runs, not 2",
        ),
        (["train=model=olmo3_tony"], "train: .*olmo3_tony"),
    ],
)
def test_invalid_settings_are_refused_before_the_first_run(
    words: Callable[..., list[str]], ran: list[str], more: list[str], message: str
) -> None:
    kept = [word for word in words() if word.partition("=")[0] not in {each.partition("=")[0] for each in more}]

    with pytest.raises(ValueError, match=message):
        job.run(compose("mixture", [*kept, *more]))
    assert not ran


def test_submit_checks_the_run_and_makes_two_arrays(words: Callable[..., list[str]], tmp_path: Path) -> None:
    site = ["job=mixture", "slurm.shards=3", "cluster=leonardo", "account=x", f"slurm.folder={tmp_path}/record"]

    submission = planned([*site, *words()])

    assert [len(each.records) for each in submission.every_round] == [3, 1]
    assert "--gpus-per-node=1" in submission.command()
    assert not [one for one in findings(submission.config, submission.settings) if one.kind == "error"]
    broken = planned([*site, *words("evaluate=suite=quick evaluate.benchmarks=[nothing]")])
    assert [one.text for one in findings(broken.config, broken.settings) if one.kind == "error"]
    served = planned([*site, *words(EVALUATE.replace("serving.device=cpu", "serving.engine=vllm serving.gpus=4"))])
    assert "--gpus-per-node=4" in served.command()
