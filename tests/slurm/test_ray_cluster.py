"""Ray on the nodes of a job: the commands, and clusters of a real Slurm that come and go."""

import json
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext.slurm import ray_cluster as module
from nemo_ext.slurm.cluster import Cluster, Container
from nemo_ext.slurm.ray_cluster import ClusterError, Ports, node_words, ray_cluster, start_command

JOB = """\
import os, subprocess, sys
from pathlib import Path
from nemo_ext.slurm.ray_cluster import ray_cluster

def srun(words, *options):
    return ["srun", *options, sys.executable, *words]

nodes = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True).stdout.split()
job = os.environ["SLURM_JOB_ID"]
with ray_cluster(srun, nodes, job=job, logs=Path("logs"), environment=os.environ, wait=180, grace=5) as cluster:
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


def test_jobs_have_ports_of_their_own() -> None:
    blocks = [set(range(Ports.of(str(job)).first, Ports.of(str(job)).first + 64)) for job in range(700, 764)]
    assert sum(map(len, blocks)) == len(set.union(*blocks))
    # NeMo-RL's own end at 28000, and from 32768 on the kernel hands them out.
    assert min(set.union(*blocks)) > 28_000
    assert max(set.union(*blocks)) < 32_768


def test_nodes_on_one_machine_have_ports_of_their_own() -> None:
    ports = Ports.of("7")
    used = [*ports.head().values(), *map(int, ports.head_variables().values())]
    used += [port for place in range(7) for port in ports.node(place).values()]
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(ports.first, ports.first + 64))
    with pytest.raises(ClusterError, match="8 nodes have one address"):
        ports.node(7)


def test_ports_in_use_are_passed_over() -> None:
    ports = Ports.free("7")
    with module.socket.create_server(("", ports.first + 63)):
        assert Ports.free("7").first == ports.first + 64


def test_commands() -> None:
    shared: dict[str, Any] = {"job": "65", "restart": "2", "address": "10.0.0.1:28736", "ports": Ports.of("65")}
    assert node_words("a1", place=0, head=True, **shared) == [
        *("-m", "nemo_ext.slurm.ray_cluster", "hold", "65", "10.0.0.1:28744", "", "0"),
        *("--head", "--include-dashboard=false"),
        *("--temp-dir=/tmp/ray-65/2-0", '--resources={"slurm_node:a1": 1}'),
        *("--port=28736", "--ray-client-server-port=28737", "--dashboard-port=28738"),
        *("--node-manager-port=28744", "--object-manager-port=28745", "--runtime-env-agent-port=28746"),
        *("--dashboard-agent-grpc-port=28747", "--dashboard-agent-listen-port=28748", "--metrics-export-port=28749"),
        *("--min-worker-port=0", "--max-worker-port=0"),
    ]
    assert node_words("a2", place=1, head=False, **shared)[7:11] == [
        *("--address=10.0.0.1:28736", "--temp-dir=/tmp/ray-65/2-1", '--resources={"slurm_node:a2": 1}'),
        "--node-manager-port=28752",
    ]
    step = {"SLURM_CPUS_ON_NODE": "32", "SLURM_GPUS_ON_NODE": "4"}
    assert start_command(["--address=10.0.0.1:28736"], host="10.0.0.2", environment=step) == [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--log-color=false", "--node-ip-address=10.0.0.2", "--num-cpus=32", "--num-gpus=4"),
        "--address=10.0.0.1:28736",
    ]


def test_files_of_a_start_that_was_killed_are_removed() -> None:
    folder = Path("/tmp/ray-4294967295")
    try:
        for name in ("0-0", "1-1"):
            (folder / name / "session").mkdir(parents=True)
        module._make_folder("4294967295", folder / "1-0")
        assert [path.name for path in folder.iterdir()] == ["1-1"]
    finally:
        module._clean("4294967295")
    assert not folder.exists()


class Steps:
    """In the place of srun: what each step is, as a shell command; what was asked for."""

    def __init__(self, cluster: Cluster, **commands: str) -> None:
        self.cluster = cluster
        self.commands = commands
        self.asked: list[list[str]] = []

    def __call__(self, words: Sequence[str], *options: str) -> list[str]:
        inside = self.cluster.inside(["python", *words], self.cluster.variables())
        self.asked.append(["srun", *options, *self.cluster.srun_options(), *inside])
        what = words[2] if words[0] == "-m" else "driver"
        head = "head" if "--head" in words else what
        return ["bash", "-c", self.commands.get(head, self.commands.get(what, "cat"))]


def start(steps: Steps, logs: Path, said: list[str], **options: Any) -> Any:
    nodes = ("localhost", "127.0.0.1")
    environment = {**os.environ, "SRUN_CPUS_PER_TASK": "8", "RAY_AUTH_MODE": "disabled"}
    return ray_cluster(steps, nodes, job="65", logs=logs, environment=environment, say=said.append, **options)


@pytest.mark.parametrize("runtime", ["none", "singularity", "pyxis"])
def test_steps(runtime: Any, tmp_path: Path) -> None:
    image = None if runtime == "none" else "/images/rl.sif"
    site = Cluster(name="site", container=Container(runtime=runtime, image=image), environment={"A": "b"})
    steps = Steps(site, joined="echo joined localhost; echo joined 127.0.0.1")
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
    head, worker, joined, driver = steps.asked
    host, _, port = address.partition(":")
    raylet = f"{host}:{int(port) + 8}"
    words = ["-m", "nemo_ext.slurm.ray_cluster"]
    common = [*step, "--nodelist=localhost", *name]
    assert head[: head.index("--head") + 1] == [*common, *python, *words, "hold", "65", raylet, "", "0", "--head"]
    assert worker[: worker.index("hold")] == [*step, "--nodelist=127.0.0.1", *python, *words]
    assert joined == [*common, *python, *words, "joined", address, "600", "localhost", "127.0.0.1"]
    assert driver == [*common, "--label", *python, "-c", "pass"]
    assert said == [
        "Ray: localhost has joined, 1 of 2",
        "Ray: 127.0.0.1 has joined, 2 of 2",
        f"Ray: 2 nodes at {address}",
    ]


def test_each_job_has_a_token(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):
        steps = Steps(Cluster(name="site"), joined="echo joined localhost")
        with ray_cluster(steps, ["localhost"], job="65", logs=tmp_path, environment=dict(os.environ)) as cluster:
            assert cluster.environment["RAY_AUTH_MODE"] == "token"
            tokens.add(cluster.environment["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2


def test_a_node_whose_step_ends_is_named(tmp_path: Path) -> None:
    steps = Steps(
        Cluster(name="site"),
        head="cat",
        hold="sleep 1; echo no such image; exit 3",
        joined="echo joined localhost; cat",
    )
    with pytest.raises(ClusterError) as error, start(steps, tmp_path, []):
        pass
    assert str(error.value) == (
        "Ray: 127.0.0.1 did not join before one ended\n"
        f"127.0.0.1 ended with exit code 3; the end of {tmp_path}/ray-127.0.0.1.log:\nno such image"
    )


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    steps = Steps(
        Cluster(name="site"), head="cat", hold="echo pulling the image; cat", joined="echo joined localhost; sleep 100"
    )
    with pytest.raises(ClusterError) as error, start(steps, tmp_path, [], wait=2):
        pass
    assert str(error.value) == (
        "Ray: 127.0.0.1 did not join within 2 s\n"
        f"127.0.0.1 runs, but has not joined; the end of {tmp_path}/ray-127.0.0.1.log:\npulling the image"
    )


def test_a_warning_without_an_end_hides_no_node(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"), joined="printf warning >&2; echo joined localhost; echo joined 127.0.0.1")
    said: list[str] = []
    with start(steps, tmp_path, said, wait=10):
        assert said[:2] == ["Ray: localhost has joined, 1 of 2", "Ray: 127.0.0.1 has joined, 2 of 2"]


def test_a_container_without_ray_is_told(tmp_path: Path) -> None:
    steps = Steps(Cluster(name="site"), joined="echo No module named ray >&2; exit 1")
    with pytest.raises(ClusterError, match=r"cannot be asked for its nodes; the end of .*:\nNo module named ray"):
        start(steps, tmp_path, []).__enter__()


def test_a_driver_that_hangs_after_a_loss_is_ended(tmp_path: Path) -> None:
    hold = f"while [ ! -e {tmp_path}/lost ]; do sleep 0.1; done; echo gone; exit 9"
    joined = "echo joined localhost; echo joined 127.0.0.1"
    steps = Steps(
        Cluster(name="site"), head="cat", hold=hold, joined=joined, driver=f"touch {tmp_path}/lost; sleep 100"
    )
    said: list[str] = []
    with start(steps, tmp_path, said, grace=1) as cluster:
        assert cluster.run(["-c", "pass"]) != 0
        assert cluster.lost() == ["127.0.0.1"]
    assert said[3:] == [
        f"Ray on 127.0.0.1 ended with exit code 9; the end of {tmp_path}/ray-127.0.0.1.log:\ngone",
        "the driver still runs 1 s after 127.0.0.1 was lost: ended",
    ]
    assert steps.asked[-1][-3:] == ["nemo_ext.slurm.ray_cluster", "clean", "65"]


def processes(pattern: str) -> list[psutil.Process]:
    """By what their command line has."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if re.search(pattern, " ".join(process.info["cmdline"] or ()))
    ]


def left(job: str) -> list[str]:
    """Processes and files of a job's Ray."""
    found = processes(f"/tmp/ray-{job}/|nemo_ext.slurm.ray_cluster hold {job} ")
    ours = [str(process.info) for process in found if process.status() != psutil.STATUS_ZOMBIE]
    files = (file for name in (f"ray-{job}", f"ray-{job}[-.]*") for file in Path("/tmp").glob(name))
    return [*ours, *map(str, files)]


@pytest.mark.slow
@one_at_a_time
def test_what_a_worker_forgets_ends_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: here no Slurm kills what is left of a step."""
    pytest.importorskip("ray", minversion="2.49", reason="Ray is in the extra nemo_rl")
    monkeypatch.chdir(tmp_path)
    job = str(2**32 + os.getpid())
    environment = {**os.environ, "SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "0"}

    def here(words: Sequence[str], *options: str) -> list[str]:
        return [sys.executable, *words]

    with ray_cluster(here, ["localhost"], job=job, logs=tmp_path, environment=environment) as cluster:
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
    (raylet,) = processes(f"/raylet .*/tmp/ray-{job}/0-1")
    raylet.kill()
    slurm.wait(lambda: ended(slurm, job), what=lambda: "job")

    assert slurm.state(job) == "FAILED"
    said = (tmp_path / "out").read_text()
    assert "Ray on n2 ended with exit code 1; the end of logs/ray-n2.log:" in said, logs(tmp_path)
    assert "the driver still runs 5 s after n2 was lost: ended" in said
    assert left(job) == []
