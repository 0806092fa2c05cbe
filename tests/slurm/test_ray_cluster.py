"""Ray on the nodes of a job: the commands, and the start and end of clusters on a real Slurm."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext.slurm.cluster import Cluster, Container
from nemo_ext.slurm.ray_cluster import ClusterError, RayCluster

JOB = """\
import os, subprocess, sys
from pathlib import Path
from nemo_ext.slurm.ray_cluster import RayCluster

def srun(words, *options):
    return ["srun", *options, sys.executable, *words]

nodes = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True).stdout.split()
job = os.environ["SLURM_JOB_ID"]
ray = RayCluster(srun, nodes, job=job, logs=Path("logs"), environment=os.environ, wait=180, grace=5)
with ray.running() as cluster:
    code = cluster.run(["driver.py"])
sys.exit(code)
"""
TWO_NODES = """\
import json, os, resource
import ray

ray.init(address="auto")

@ray.remote(num_gpus=1)
def seen():
    node = ray.get_runtime_context().get_node_id()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return node, os.getpid(), os.environ["COLOUR"], "SLURM_PROCID" in os.environ, files

tasks = [seen.options(resources={f"slurm_node:{name}": 1}).remote() for name in ("n1", "n2")]
result = {"nodes": [node["Resources"] for node in ray.nodes() if node["Alive"]], "tasks": ray.get(tasks)}
with open("result.json", "w") as file:
    json.dump(result, file)
"""


FORGETFUL = """\
import os, subprocess
import ray

ray.init(address="auto")

@ray.remote
def forget():
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

with open("forgotten", "w") as file:
    file.write(str(ray.get(forget.remote())))
os._exit(0)
"""

one_at_a_time = pytest.mark.xdist_group(name="ray_cluster")
"""With other tests' clusters (IN_ONE_WORKER in tests/conftest.py): two at once take too long to start on two cores."""


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = Path(f"/tmp/ray-{2**32 + os.getpid()}")
    folder.symlink_to(tmp_path)
    try:
        command = [sys.executable, "-m", "nemo_ext.slurm.ray_cluster", folder.name.removeprefix("ray-"), "", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        folder.unlink()
    assert (done.returncode, done.stderr) == (1, f"{folder} is a symbolic link or belongs to another user; remove it\n")


JOINS = "echo Ray runtime started.; cat"


class Steps:
    """Simulated srun: the shell command of every step, and the recorded requests."""

    def __init__(self, cluster: Cluster, **commands: str) -> None:
        self.cluster = cluster
        self.commands = commands
        self.asked: list[list[str]] = []

    def __call__(self, words: Sequence[str], *options: str) -> list[str]:
        inside = self.cluster.inside(["python", *words], self.cluster.variables())
        self.asked.append(["srun", *options, *self.cluster.srun_options(), *inside])
        what = "driver" if words[0] == "-c" else "head" if "--head" in words else "node"
        return ["bash", "-c", self.commands.get(what, "" if what == "driver" else JOINS)]


def start(steps: Steps, logs: Path, said: list[str], **options: Any) -> Any:
    nodes = ("localhost", "127.0.0.1")
    environment = {**os.environ, "SRUN_CPUS_PER_TASK": "8", "RAY_AUTH_MODE": "disabled"}
    cluster = RayCluster(steps, nodes, job="65", logs=logs, environment=environment, say=said.append, **options)
    return cluster.running()


@pytest.mark.parametrize("runtime", ["none", "singularity", "pyxis"])
def test_steps(runtime: Any, tmp_path: Path) -> None:
    image = None if runtime == "none" else "/images/rl.sif"
    site = Cluster(name="site", container=Container(runtime=runtime, image=image), environment={"A": "b"})
    steps = Steps(site)
    said: list[str] = []
    with start(steps, tmp_path, said, container=runtime) as cluster:
        assert cluster.run(["-c", "pass"], "--label") == 0
        assert "SRUN_CPUS_PER_TASK" not in cluster.environment
        address = cluster.environment["RAY_ADDRESS"]

    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none"]
    name = ["--container-name=ray-65"] if runtime == "pyxis" else []
    image_options = ["--container-image=/images/rl.sif", "--no-container-mount-home"] if runtime == "pyxis" else []
    inside = ["singularity", "exec", "--env", "A=b", "/images/rl.sif"] if runtime == "singularity" else []
    python = [*image_options, *inside, "python"]
    head, worker, driver = steps.asked
    host = address.partition(":")[0]
    words = ["-m", "nemo_ext.slurm.ray_cluster", "65", "", "0"]
    ports = [f"--{each}-port=0" for each in ("dashboard-agent-listen", "min-worker", "max-worker")]
    common = [*step, "--nodelist=localhost", *name]
    begin = [*common, *python, *words, "--head", "--include-dashboard=false", f"--node-ip-address={host}"]
    assert head[: len(begin)] == begin
    assert head[-4:] == [*ports, '--resources={"slurm_node:localhost": 1}']
    join = [f"--address={address}", *ports, '--resources={"slurm_node:127.0.0.1": 1}']
    assert worker == [*step, "--nodelist=127.0.0.1", *python, *words, *join]
    assert driver == [*common, "--label", *python, "-c", "pass"]
    assert said == [
        "Ray: localhost has joined, 1 of 2",
        "Ray: 127.0.0.1 has joined, 2 of 2",
        f"Ray: 2 nodes at {address}",
    ]


def test_jobs_on_one_machine_have_separate_ports_and_tokens(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"))
    options: dict[str, Any] = {"logs": tmp_path, "environment": os.environ}
    with ExitStack() as stack:
        clusters = [RayCluster(steps, ["localhost"], job=str(job), **options) for job in range(3)]
        environments = [stack.enter_context(cluster.running()).environment for cluster in clusters]
    assert {environment["RAY_AUTH_MODE"] for environment in environments} == {"token"}
    assert len({environment["RAY_AUTH_TOKEN"] for environment in environments}) == 3
    numbers = [found[1] for words in steps.asked for word in words if (found := re.fullmatch(r".*port=(\d+)", word))]
    assert len({number for number in numbers if number != "0"}) == 9


def test_a_node_whose_step_ends_is_named(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"), node="sleep 1; echo no such image; exit 3")
    with pytest.raises(ClusterError) as error, start(steps, tmp_path, []):
        pass
    assert str(error.value) == (
        "Ray: 127.0.0.1 did not join before a node was lost; correct the error in its log:\n"
        f"127.0.0.1 ended with exit code 3; the end of {tmp_path}/ray-127.0.0.1.log:\nno such image"
    )


def test_a_node_that_does_not_join_is_named(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"), node="echo pulling the image; cat")
    with pytest.raises(ClusterError) as error, start(steps, tmp_path, [], wait=2):
        pass
    assert str(error.value) == (
        "Ray: 127.0.0.1 did not join within 2 s; correct the error in its log:\n"
        f"127.0.0.1 runs, but has not joined; the end of {tmp_path}/ray-127.0.0.1.log:\npulling the image"
    )


def test_a_head_that_does_not_start_is_named_and_no_other_node_is_started(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"), head="echo No module named ray >&2; exit 1")
    with pytest.raises(
        ClusterError, match=r"^Ray: localhost did not join before a node was lost; .*\n.*:\nNo module named ray$"
    ):
        start(steps, tmp_path, []).__enter__()
    assert len(steps.asked) == 1


def test_a_driver_that_hangs_after_a_loss_is_ended(tmp_path: Path) -> None:
    node = f"echo Ray runtime started.; while [ ! -e {tmp_path}/lost ]; do sleep 0.1; done; echo gone; exit 9"
    steps = Steps(Cluster(name="site"), node=node, driver=f"touch {tmp_path}/lost; sleep 100")
    said: list[str] = []
    with start(steps, tmp_path, said, grace=1) as cluster:
        assert cluster.run(["-c", "pass"]) != 0
        assert cluster.lost() == ["127.0.0.1"]
    assert said[3:] == [
        f"Ray on 127.0.0.1 ended with exit code 9; the end of {tmp_path}/ray-127.0.0.1.log:\n"
        "Ray runtime started.\ngone",
        "the driver was still running 1 s after 127.0.0.1 was lost, and is terminated",
    ]


def processes(pattern: str) -> list[psutil.Process]:
    """Processes whose command line contains a text."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if re.search(pattern, " ".join(process.info["cmdline"] or ()))
    ]


def left(job: str) -> list[str]:
    """Processes and files of a job's Ray."""
    found = processes(f"/tmp/ray-{job}/|nemo_ext.slurm.ray_cluster {job} ")
    ours = [str(process.info) for process in found if process.status() != psutil.STATUS_ZOMBIE]
    files = (file for name in (f"ray-{job}", f"ray-{job}[-.]*") for file in Path("/tmp").glob(name))
    return [*ours, *map(str, files)]


@pytest.mark.slow
@one_at_a_time
def test_processes_that_a_worker_left_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm, which would kill remaining processes of a step."""
    pytest.importorskip("ray", minversion="2.49", reason="Ray is in the extra nemo_rl")
    monkeypatch.chdir(tmp_path)
    job = str(2**32 + os.getpid())
    environment = {**os.environ, "SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "0"}

    def here(words: Sequence[str], *options: str) -> list[str]:
        return [sys.executable, *words]

    with RayCluster(here, ["localhost"], job=job, logs=tmp_path, environment=environment).running() as cluster:
        assert cluster.run(["-c", FORGETFUL]) == 0
        assert len(left(job)) > 4

    assert not psutil.pid_exists(int((tmp_path / "forgotten").read_text()))
    assert left(job) == []


@pytest.fixture
def submit(slurm: Any, tmp_path: Path) -> Callable[[str], str]:
    pytest.importorskip("ray", minversion="2.49", reason="Ray is in the extra nemo_rl")
    (tmp_path / "job.py").write_text(JOB)

    def submitted(driver: str) -> str:
        (tmp_path / "driver.py").write_text(driver)
        words = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2", "--parsable")
        place = (f"--chdir={tmp_path}", f"--output={tmp_path}/out", "--export=ALL,COLOUR=green")
        return slurm.call("sbatch", *words, *place, f"--wrap=exec {sys.executable} job.py").strip()

    return submitted


def ended(slurm: Any, job: str) -> bool:
    return slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED")


def logs(folder: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()}" for path in [*folder.glob("out"), *folder.glob("logs/*")])


@pytest.mark.slow
@pytest.mark.slurm
@one_at_a_time
def test_a_driver_has_both_nodes(slurm: Any, submit: Callable[[str], str], tmp_path: Path) -> None:
    job = submit(TWO_NODES)
    slurm.wait(lambda: ended(slurm, job), what=lambda: "job")

    assert slurm.state(job) == "COMPLETED", logs(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(node["CPU"], node["GPU"]) for node in result["nodes"]] == [(2, 2), (2, 2)]
    first, second = result["tasks"]
    assert first[0] != second[0]
    assert first[2:] == second[2:] == ["green", False, min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])]
    assert not any(psutil.pid_exists(task[1]) for task in (first, second))
    assert left(job) == []


@pytest.mark.deep
@pytest.mark.slurm
@one_at_a_time
def test_a_driver_that_fails(slurm: Any, submit: Callable[[str], str], tmp_path: Path) -> None:
    job = submit("import ray, sys\nray.init(address='auto')\nsys.exit(7)")
    slurm.wait(lambda: ended(slurm, job), what=lambda: "job")

    assert slurm.state(job) == "FAILED"
    assert "ExitCode=7:0" in slurm.call("scontrol", "show", "job", job), logs(tmp_path)
    assert left(job) == []


@pytest.mark.deep
@pytest.mark.slurm
@one_at_a_time
def test_a_job_that_is_cancelled(slurm: Any, submit: Callable[[str], str], tmp_path: Path) -> None:
    job = submit("import ray, time\nray.init(address='auto')\nopen('ready', 'w')\ntime.sleep(600)")
    slurm.wait((tmp_path / "ready").exists, what=lambda: "driver")
    assert len(left(job)) > 4
    slurm.call("scancel", job)
    slurm.wait(lambda: slurm.call("squeue", "--noheader") == "", what=lambda: "job")

    assert slurm.state(job) == "CANCELLED"
    slurm.wait(lambda: left(job) == [], seconds=10, what=lambda: "Ray")


@pytest.mark.deep
@pytest.mark.slurm
@one_at_a_time
def test_a_node_that_is_lost(slurm: Any, submit: Callable[[str], str], tmp_path: Path) -> None:
    driver = "import ray, time\nray.init(address='auto')\nopen('ready', 'w')\ntime.sleep(600)"
    job = submit(driver)
    slurm.wait((tmp_path / "ready").exists, what=lambda: "driver")
    (raylet,) = processes(f"/raylet .*/tmp/ray-{job}/.*slurm_node:n2")
    raylet.kill()
    slurm.wait(lambda: ended(slurm, job), what=lambda: "job")

    assert slurm.state(job) == "FAILED"
    said = (tmp_path / "out").read_text()
    assert "Ray on n2 ended with exit code 1; the end of logs/ray-n2.log:" in said, logs(tmp_path)
    assert "the driver was still running 5 s after n2 was lost, and is terminated" in said
    assert left(job) == []
