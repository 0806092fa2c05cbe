import gzip
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nemo_ext
from nemo_ext.data.curriculum.job import run
from nemo_ext.data.curriculum.layout import read_order
from nemo_ext.job.config import compose
from tests.json_lines import write_jsonl

ROOT = Path(nemo_ext.__file__).parents[1]


def curriculum(folder: Path, *words: str, output: str = "made") -> Path:
    """Run the job on the folder's files; `words` override the defaults."""
    given = {word.split("=")[0].lstrip("+") for word in words}
    defaults = [f"prompts={folder / 'prompts.jsonl'}", f"rollouts={folder / 'rollouts.jsonl'}", "batch=10", "workers=1"]
    words = (*words, *(word for word in defaults if word.split("=")[0] not in given))
    run(compose("curriculum", [*words, f"output={folder / output}"]))
    return folder / output


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def ids_of(made: Path) -> list[str]:
    return [json.loads(line)["id"] for line in lines_of(made / "curriculum.jsonl")]


def rates_of(problems: Path) -> dict[str, float]:
    solved: Counter[str] = Counter()
    for line in lines_of(problems / "rollouts.jsonl"):
        record = json.loads(line)
        solved[record["id"]] += int(record["reward"])
    return {f"p{n}": solved[f"p{n}"] / 8 for n in range(300)}


def test_missing_pyarrow_is_reported_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ValueError, match=r"^pass rates are written to profile.parquet.*pip install 'nemo_ext\[data\]'"):
        curriculum(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("pictures")
def test_rollouts_and_prompts_become_a_curriculum(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = curriculum(problems)

    rates, source = rates_of(problems), set(lines_of(problems / "prompts.jsonl"))
    ids, lines = ids_of(made), lines_of(made / "curriculum.jsonl")
    solved = sum(rate == 1 for rate in rates.values())
    assert set(lines) <= source and len(set(ids)) == len(ids), "the records as they were, each once"
    assert all(rates[one] < 1 for one in ids)
    assert len(ids) % 10 == 0 and 300 - solved - len(ids) < 30
    stats = json.loads((made / "curriculum.json").read_text())
    means = np.array([rates[one] for one in ids]).reshape(-1, 10).mean(axis=1)
    np.testing.assert_allclose(stats["by_step"]["mean"], means, atol=1e-4)
    assert stats["by_step"]["target"][0] == 0.8 and stats["by_step"]["target"][-1] == 0.2
    assert stats["left_out"]["always solved"] == solved
    assert sum(stats["left_out"].values()) + len(ids) == 300, "every prompt is drawn or has a reason"
    assert (made / "plot.png").stat().st_size > 2_000
    report = (made / "report.md").read_text()
    assert "| always solved |" in report and "| math |" in report
    assert f"{solved} always solved" in capsys.readouterr().out
    assert sorted(path.name for path in made.glob("[!.]*")) == [
        "curriculum.json", "curriculum.jsonl", "curriculum.npz", "plot.png", "profile.parquet", "report.md",
    ]  # fmt: skip


def test_the_file_depends_on_the_seed_only(problems: Path) -> None:
    first, again = curriculum(problems), curriculum(problems, "workers=2", output="again")
    other = curriculum(problems, "seed=2", output="other")

    assert (first / "curriculum.jsonl").read_bytes() == (again / "curriculum.jsonl").read_bytes()
    assert ids_of(first) != ids_of(other)


def test_packed_prompts_may_have_a_relative_output(problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = problems / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((problems / "prompts.jsonl").read_bytes()))
    monkeypatch.chdir(problems)

    curriculum(Path(), f"prompts={packed}", output="relative")

    plain = curriculum(problems)
    assert (problems / "relative" / "curriculum.jsonl").read_bytes() == (plain / "curriculum.jsonl").read_bytes()


def test_shares_of_domains_and_filters(problems: Path) -> None:
    made = curriculum(
        problems, "domains={math: 3, code: 1}", "filters.drop_from=0.75", "filters.keep_from=0.1", "steps=8"
    )

    rates, ids = rates_of(problems), ids_of(made)
    assert len(ids) == 80 and all(0.1 <= rates[one] < 0.75 for one in ids)
    assert sum(int(one[1:]) % 2 for one in ids) == 60


def test_the_next_curriculum_has_the_unused_prompts_with_new_pass_rates(problems: Path) -> None:
    first = curriculum(problems, "filters.drop_from=null")
    trained = ids_of(first)[: 12 * 10]
    better = write_jsonl(
        problems / "better.jsonl", [{"id": f"p{n}", "reward": int(r < n % 8)} for n in range(300) for r in range(8)]
    )

    second = curriculum(
        problems, f"rollouts={better}", f"previous={first}", "previous_steps=12", "filters.drop_from=null",
        "steps=20", "first_step=5", output="second",
    )  # fmt: skip
    third = curriculum(problems, f"rollouts={better}", f"previous={second}", "filters.drop_from=null", output="third")
    repeated = curriculum(
        problems, f"rollouts={better}", f"previous={third}", "filters.drop_from=null", "steps=30", "exhausted=repeat",
        output="repeated",
    )  # fmt: skip

    assert len(ids_of(second)) == 150
    assert not set(trained) & set(ids_of(second))
    stats = json.loads((second / "curriculum.json").read_text())
    assert stats["left_out"]["used before"] == 120
    np.testing.assert_allclose(stats["by_step"]["target"], np.linspace(0.8, 0.2, 20)[5:], atol=1e-4)
    mean = np.mean([int(one[1:]) % 8 / 8 for one in ids_of(second)[:10]])
    assert stats["by_step"]["mean"][0] == pytest.approx(mean, abs=1e-4), "of the new rollouts"
    assert not set(ids_of(third)) & (set(trained) | set(ids_of(second)))
    counts = Counter([*trained, *ids_of(second), *ids_of(third), *ids_of(repeated)])
    assert set(counts.values()) <= {1, 2, 3} and len(counts) == 300
    assert len(set(ids_of(repeated)[:-20])) > 270, "those used least come first"


def test_copies_with_thinking_off(problems: Path) -> None:
    made = curriculum(problems, "thinking.off_share=0.2", "filters.drop_from=null", "thinking.key=mode_on")

    records = [json.loads(line) for line in lines_of(made / "curriculum.jsonl")]
    modes = [record.pop("mode_on") for record in records]
    source = {json.loads(line)["id"]: json.loads(line) for line in lines_of(problems / "prompts.jsonl")}
    assert all(record == source[record["id"]] for record in records)
    assert len({(record["id"], mode) for record, mode in zip(records, modes, strict=True)}) == len(records)
    assert modes.count(False) / len(modes) == pytest.approx(0.2, abs=0.02)


def test_existing_system_messages_and_modes(problems: Path) -> None:
    user = {"role": "user", "content": "q"}
    write_jsonl(
        problems / "prompts.jsonl",
        [
            {
                "id": f"p{n}",
                "thinking": None,
                "prompt": [*([{"role": "system", "content": "s"}] * (n % 2)), user | {"n": n}],
            }
            for n in range(300)
        ],
    )

    made = curriculum(
        problems, "thinking={off_share: 0.5, system_on: thinking on, system_off: thinking off}", "keys.domain=null"
    )

    for line in lines_of(made / "curriculum.jsonl"):
        record = json.loads(line)
        first, number = record["prompt"][0], int(record["id"][1:])
        assert first["role"] == "system" and line.count('"thinking"') == 1
        mode = "thinking on" if record["thinking"] else "thinking off"
        assert first["content"] == mode + "\ns" * (number % 2)
        assert len(record["prompt"]) == 2


def test_a_profile_without_rollouts_has_a_level_for_each_pass_rate(problems: Path) -> None:
    rates = rates_of(problems)
    own = write_jsonl(problems / "own.jsonl", [{"id": one, "pass_rate": rate} for one, rate in rates.items()])

    whole = curriculum(problems)
    made = curriculum(problems, f"profile={own}", "rollouts=null", output="from_rates")

    assert ids_of(made) == ids_of(whole)


def test_domain_files_of_an_earlier_curriculum_are_removed(problems: Path) -> None:
    made = curriculum(problems, "split_domains=true")
    (made / "domains" / "mine.txt").write_text("mine")
    assert (made / "domains" / "math.jsonl").exists() and read_order(made)

    curriculum(problems, "seed=2")

    assert [path.name for path in (made / "domains").iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="make the curriculum with split_domains=true"):
        read_order(made)


def test_only_domain_files_of_the_job_are_removed(problems: Path) -> None:
    made = curriculum(problems, "split_domains=true")
    (made / "domains/order.npz").unlink()  # as if the job had been killed before its end
    curriculum(problems, "split_domains=true", "domains={math: 1}")
    assert sorted(path.name for path in (made / "domains").glob("*.jsonl")) == ["math.jsonl"]
    (made / "domains/mine.jsonl").write_text("mine")

    with pytest.raises(
        ValueError, match=r"domains/mine\.jsonl was not written by this job: move it, or choose another"
    ):
        curriculum(problems, "split_domains=true")
    assert (made / "domains/mine.jsonl").read_text() == "mine"
    assert (made / "domains/math.jsonl").exists() and read_order(made), "the earlier curriculum is unchanged"


def test_empty_files_are_ignored(problems: Path) -> None:
    whole = curriculum(problems)
    (problems / "empty.jsonl").touch()

    made = curriculum(problems, f"prompts=[{problems / 'empty.jsonl'}, {problems / 'prompts.jsonl'}]", output="more")

    assert ids_of(made) == ids_of(whole)


def test_inputs_in_the_temporary_folder_are_refused(problems: Path) -> None:
    inside = problems / "made" / ".unpacked" / "prompts.jsonl"
    inside.parent.mkdir(parents=True)
    (problems / "prompts.jsonl").rename(inside)

    with pytest.raises(ValueError, match=r"prompts\.jsonl is inside .*\.unpacked"):
        curriculum(problems, f"prompts={inside}")

    assert inside.exists()


def test_a_profile_can_be_made_first(problems: Path) -> None:
    alone = problems / "alone"
    run(compose("curriculum", [f"rollouts={problems / 'rollouts.jsonl'}", f"output={alone}"]))

    whole = curriculum(problems)
    made = curriculum(problems, f"profile={alone / 'profile.parquet'}", "rollouts=null", output="from_profile")

    assert sorted(path.name for path in alone.glob("[!.]*")) == ["profile.parquet"]
    assert ids_of(made) == ids_of(whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["domains={maths: 1}"], "domains.maths is not the domain of any prompt; did you mean 'math'"),
        (["domains={math: 0}"], "the shares sum to zero"),
        (["filters.drop_from=0"], "no prompt is left to train on (excluded: 300 pass rate 0 or more): relax filters"),
        (["rollout_keys.id=tokens"], "none of the 300 prompts has an id that is in the profile of 8 prompts"),
        (["rollout_keys.reward=score"], "there is no value under key 'score'; the record's keys are"),
        (["batch=400"], "too few prompts are left for a step of batch=400"),
        (["sigma=0"], "sigma=0"),
        (["+keys.tezt=a"], "unknown key 'keys.tezt'"),
        (["+filters.drop_form=1"], "unknown key 'filters.drop_form': did you mean 'drop_from'"),
        (["first_step=4"], "requires steps: set steps to the length"),
        (["previous=/nowhere"], "has no curriculum.npz"),
        (["profile=a.parquet"], "rollouts and profile are both set"),
        (["prompts=none.jsonl"], "prompts: file none.jsonl does not exist"),
        (["thinking={off_share: 0.2, system_on: a}"], "require lists of messages as prompts"),
    ],
)
def test_invalid_settings_are_refused(problems: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        curriculum(problems, *words)

    assert message in str(caught.value)
    assert not (problems / "made/curriculum.jsonl").exists()


@pytest.mark.slow
def test_the_command_imports_no_torch(problems: Path) -> None:
    # As `python launchers/curriculum.py` does, but torch cannot be imported.
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.path.insert(0, 'unused'); "
        f"runpy.run_path({str(ROOT / 'launchers/curriculum.py')!r}, run_name='__main__')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def command(*words: str, file_size: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *words], cwd=problems, env=environment, capture_output=True, text=True,
            timeout=120, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_size,) * 2),
        )  # fmt: skip

    helped = command("--help")
    made = command("prompts=prompts.jsonl", "rollouts=[rollouts.jsonl]", "output=made", "batch=10", "workers=2")
    refused = command("prompts=prompts.jsonl", "output=made")

    assert helped.returncode == 0 and "exhausted" in helped.stdout
    assert made.returncode == 0, made.stderr
    assert ids_of(problems / "made")
    full = command("prompts=prompts.jsonl", "rollouts=rollouts.jsonl", "output=full", "batch=10", file_size=2000)
    assert (full.returncode, full.stderr.splitlines()[-1]) == (1, "error: File too large"), full.stderr
    assert "Traceback" not in full.stderr
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        refused.stderr
        == "error: pass rates are required: set rollouts to files of rollouts, or profile to an earlier profile\n"
    )
