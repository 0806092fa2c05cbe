"""The checks for a machine with a GPU, without one: their commands and configs are valid, their time limit holds."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from nemo_ext.job.config import compose

PATH = Path(__file__).parents[1] / "benchmarks" / "gpu_checks.py"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_checks", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_checks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_run_composes(checks: ModuleType) -> None:
    words = {case.words for check in checks.CHECKS.values() for case in check.cases if not case.command}
    for each in words:
        compose("train", ["run_dir=unused", *each])


def test_a_command_ends_at_its_limit_and_resumes_with_the_rest(
    checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(name: str, code: str) -> object:
        return checks.Case(name, ("-c", code), command=True)

    fast = case("fast", f"open(r'{tmp_path}/starts', 'a').write('x')")
    slow = case("slow", "import time, subprocess; subprocess.Popen(['sleep', '60']); time.sleep(60)")
    monkeypatch.setattr(checks, "CHECKS", {"one": checks.Check("?", (fast, slow))})
    began = time.monotonic()

    session = checks.Session(tmp_path / "out", 4.0)
    session.run(["one"])

    assert time.monotonic() - began < 30
    assert list(session.failed.values()) == ["not finished at the time limit"]
    assert "fast: done" in (report := (tmp_path / "out/report.md").read_text())
    assert "slow: not finished at the time limit" in report

    monkeypatch.setattr(checks, "CHECKS", {"one": checks.Check("?", (fast, case("slow", "print('1 passed')")))})
    again = checks.Session(tmp_path / "out", 60.0)
    again.run(["one"])
    assert not again.failed
    assert "slow: done, 1 passed" in (tmp_path / "out/report.md").read_text()
    assert (tmp_path / "starts").read_text() == "x"
