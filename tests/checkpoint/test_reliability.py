"""Errors and interruptions during a conversion, and its use of memory."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import nemo_ext
from nemo_ext.checkpoint import hf, output, storage, writing
from nemo_ext.checkpoint.convert import run
from nemo_ext.checkpoint.output import RECORD, only_writer, unfinished
from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.job.config import compose

ROOT = Path(nemo_ext.__file__).parents[1]
BOTH = ("huggingface", "megatron")
SHARD = 1.5e-6
"""shard_gigabytes that cuts the small model below into about a dozen parts."""
LARGE_SHARD = 0.014


def llama(folder: Path, *, hidden: int = 16, ffn: int = 24, layers: int = 3, vocabulary: int = 40) -> Path:
    """A Llama whose weights are fast to make and all different."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    layer = {
        **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in zip("qkvo", (2, 1, 1, 2), strict=True)},
        **{"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)},
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
    }
    for name in "qkvo":
        rows, _ = layer[f"self_attn.{name}_proj"]
        layer[f"self_attn.{name}_proj"] = (rows * hidden // 2, hidden)
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    weights = {
        f"{name}.weight": (torch.arange(torch.Size(shape).numel()) % 251 + number).to(torch.bfloat16).reshape(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def converted(source: Path, to: Path, **chosen: Any) -> Path:
    settings = hf.Settings(**{"shard_gigabytes": SHARD, **chosen})
    return hf.convert(hf.plan(source, to, settings), settings, progress=False)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Path]:
    """The source for each target format."""
    source = llama(tmp_path / "source")
    return {"megatron": source, "huggingface": converted(source, tmp_path / "source_of_megatron")}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    is_hf = (checkpoint / "config.json").is_file()
    reader = SafetensorsReader(checkpoint) if is_hf else TorchDistReader(checkpoint_folder(checkpoint))
    return {name: reader.read(name) for name in reader.tensors}


def assert_same(first: Path, second: Path) -> None:
    """Byte for byte; `.metadata` contains a random name, so the tensors are compared instead."""
    names = [sorted(str(file.relative_to(place)) for file in place.rglob("*")) for place in (first, second)]
    renamed = [name.replace(f"{second.name}.yaml", f"{first.name}.yaml") for name in names[1]]
    assert names[0] == renamed
    for ours, theirs in zip(*names, strict=True):
        if (first / ours).is_file() and not ours.endswith((".metadata", ".yaml", "common.pt")):
            assert (first / ours).read_bytes() == (second / theirs).read_bytes(), ours
    assert_same_tensors(first, second)


def assert_same_tensors(first: Path, second: Path) -> None:
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Values that change when a file with tensors is written again."""
    files = [file for suffix in ("safetensors", "distcp") for file in folder.rglob(f"[!.]*.{suffix}")]
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def interrupted_at(plan: hf.Plan, number: int, settings: hf.Settings) -> None:
    """Carry out a plan until Ctrl-C arrives while a row is made."""

    def interrupt() -> Sequence[torch.Tensor]:
        raise KeyboardInterrupt

    work = list(plan.work)
    work[number] = replace(work[number], make=interrupt)
    with pytest.raises(KeyboardInterrupt):
        hf.convert(replace(plan, work=work), settings, progress=False)


# Interruptions


@pytest.mark.parametrize("to_format", BOTH)
def test_an_interruption_anywhere_loses_no_finished_part(
    to_format: str, small: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = converted(small[to_format], tmp_path / "expected")
    settings = hf.Settings(shard_gigabytes=SHARD)
    rows = len(hf.plan(small[to_format], tmp_path / "out", settings).work)

    for number in range(0, rows, 2):  # a part has two rows or three
        plan = hf.plan(small[to_format], tmp_path / f"out{number}", settings)
        interrupted_at(plan, number, settings)
        assert not plan.to.exists()
        finished = {} if not unfinished(plan.to).exists() else _finished(unfinished(plan.to))
        if finished:
            (unfinished(plan.to) / ".tmpcr4dRH").write_text("what safetensors was writing when it was killed")
        capsys.readouterr()
        hf.convert(plan, settings, progress=False)

        told = f"{plan.to}: resuming after {len(finished)} finished files\n" if finished else ""
        assert capsys.readouterr().err == told
        assert {name: written(plan.to)[name] for name in finished} == finished
        assert_same(expected, plan.to)
        assert not unfinished(plan.to).exists()


def _finished(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of recorded parts."""
    done = json.loads((folder / RECORD).read_text())["done"]
    count = {name: int(name.split("-")[1]) - 1 if "-" in name else int(name.split("_")[2]) for name in written(folder)}
    return {name: identity for name, identity in written(folder).items() if str(count[name]) in done}


@pytest.mark.parametrize("verifying", [False, True], ids=["writing", "verifying"])
def test_an_interruption_waits_for_a_safe_point(
    verifying: bool, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt in a pool's `submit` would leave its lock held or be lost in a bare `except`."""
    plan, settings = hf.plan(small["megatron"], tmp_path / "out", hf.Settings()), hf.Settings(shard_gigabytes=SHARD)
    count = sum(len(work.slots) for work in plan.work)
    lost: list[BaseException] = []
    read: list[int] = []
    over = Event()

    def checksum(tensor: torch.Tensor) -> int:
        if verifying and len(read) > count:  # the first row read again ends it
            over.wait(5)
        read.append(1)
        return storage.checksum(tensor)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            if cancel_futures:
                over.set()
            super().shutdown(wait)

        def submit(self, *given: Any, **more: Any) -> Any:
            submitted = super().submit(*given, **more)
            if (given[0] is not next) == verifying and not sent:
                sent.append(1)
                try:
                    signal.raise_signal(signal.SIGINT)
                except BaseException as error:
                    lost.append(error)
            return submitted

    sent: list[int] = []
    monkeypatch.setattr(writing, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(writing, "checksum", checksum)
    with pytest.raises(KeyboardInterrupt):
        hf.convert(plan, settings, progress=False)
    assert sent
    assert not lost
    assert len(read) <= count + 8 < 2 * count if verifying else len(read) == 1

    hf.convert(plan, settings, progress=False)
    assert_same(converted(small["megatron"], tmp_path / "expected"), plan.to)


@pytest.mark.parametrize("to_format", BOTH)
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interruption_around_the_renaming_loses_nothing(
    to_format: str, where: str, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_truly = os.replace

    def interrupted(source: Path, target: Path) -> None:
        publishes = target == tmp_path / "out"
        if where == "after" or not publishes:
            replace_truly(source, target)
        if publishes:
            raise KeyboardInterrupt

    monkeypatch.setattr(output.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(small[to_format], tmp_path / "out")
    monkeypatch.undo()
    finished = _finished(tmp_path / "out" if where == "after" else unfinished(tmp_path / "out"))
    expected = converted(small[to_format], tmp_path / "expected")

    converted(small[to_format], tmp_path / "out")

    assert len(finished) > 10
    assert {name: written(tmp_path / "out")[name] for name in finished} == finished
    assert_same_tensors(tmp_path / "out", expected)


@pytest.mark.parametrize("to_format", BOTH)
@pytest.mark.parametrize("change", ["source", "dtype", "shard_gigabytes"])
def test_another_source_or_setting_starts_over(
    to_format: str, change: str, small: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = hf.Settings(shard_gigabytes=SHARD)
    interrupted_at(hf.plan(small[to_format], tmp_path / "out", settings), -1, settings)
    capsys.readouterr()
    if change == "source":
        other = llama(tmp_path / "other", layers=3)
        weights = {name: tensor + 1 for name, tensor in tensors(other).items()}
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        source = other if to_format == "megatron" else converted(other, tmp_path / "other_megatron")
        chosen: dict[str, Any] = {}
    else:
        source = small[to_format]
        chosen = {"dtype": "float32"} if change == "dtype" else {"shard_gigabytes": 2 * SHARD}

    converted(source, tmp_path / "out", **chosen)

    told = f"{tmp_path / 'out'}: starting over, as an interrupted run left files that were made with other settings\n"
    assert capsys.readouterr().err == told
    assert_same(tmp_path / "out", converted(source, tmp_path / "expected", **chosen))


@pytest.mark.parametrize("to_format", BOTH)
@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_a_lost_part_is_made_again(to_format: str, loss: str, small: dict[str, Path], tmp_path: Path) -> None:
    """As after a power failure: the record exists; the file is missing or empty."""
    settings = hf.Settings(shard_gigabytes=SHARD)
    interrupted_at(hf.plan(small[to_format], tmp_path / "out", settings), -1, settings)
    finished = _finished(unfinished(tmp_path / "out"))
    (lost,) = unfinished(tmp_path / "out").rglob(min(finished))
    if loss == "gone":
        lost.unlink()
    else:
        os.truncate(lost, 0)

    converted(small[to_format], tmp_path / "out")

    kept = {name: identity for name, identity in finished.items() if name != lost.name}
    assert {name: written(tmp_path / "out")[name] for name in kept} == kept
    assert_same(tmp_path / "out", converted(small[to_format], tmp_path / "expected"))


@pytest.mark.parametrize("to_format", BOTH)
def test_a_finished_target_is_not_changed(
    to_format: str, small: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = converted(small[to_format], tmp_path / "out")
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in made.rglob("*")}
    capsys.readouterr()

    converted(small[to_format], tmp_path / "out")

    assert capsys.readouterr().err == f"{made} is already complete\n"
    assert {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in made.rglob("*")} == before
    assert not unfinished(made).exists()


@pytest.mark.parametrize("to_format", BOTH)
@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_an_incomplete_target_is_not_called_finished(
    to_format: str, loss: str, small: dict[str, Path], tmp_path: Path
) -> None:
    made = converted(small[to_format], tmp_path / "out")
    (lost,) = made.rglob(min(written(made)))
    if loss == "gone":
        lost.unlink()
    else:
        os.truncate(lost, 5)

    with pytest.raises(CheckpointError, match=rf"was complete, but .*{lost.name} went missing or changed since"):
        converted(small[to_format], tmp_path / "out")


@pytest.mark.parametrize("to_format", BOTH)
def test_a_bit_flipped_on_disk_is_noticed(
    to_format: str, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = writing._verify
    name = {"huggingface": "model.layers.1.mlp.up_proj.weight", "megatron": "decoder.layers.3.mlp.linear_fc2.weight"}
    value = tensors(converted(small[to_format], tmp_path / "expected"))[name[to_format]]
    pattern = value.view(torch.uint8).numpy().tobytes()

    def flip(*arguments: Any) -> None:
        (file,) = [f for f in unfinished(tmp_path / "out").rglob("*") if f.is_file() and pattern in f.read_bytes()]
        data = bytearray(file.read_bytes())
        data[data.index(pattern) + 17] ^= 4
        file.write_bytes(data)
        verify(*arguments)

    monkeypatch.setattr(writing, "_verify", flip)
    with pytest.raises(CheckpointError, match=f"{name[to_format]} reads back differently than it was written"):
        converted(small[to_format], tmp_path / "out")
    assert not (tmp_path / "out").exists()

    converted(small[to_format], tmp_path / "out", verify=False)  # reading notices it
    assert not torch.equal(tensors(tmp_path / "out")[name[to_format]], value)


# Disks


@pytest.mark.parametrize("to_format", BOTH)
def test_too_little_disk_space_is_refused_before_anything_is_written(
    to_format: str, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage._replace(free=13_000))

    with pytest.raises(CheckpointError, match=r"to=.*/out requires 0.0 GB, but .* has 0.0 GB free: free disk space"):
        converted(small[to_format], tmp_path / "deep" / "out")
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize("to_format", BOTH)
def test_finished_parts_need_no_space(
    to_format: str, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = hf.Settings(shard_gigabytes=SHARD)
    interrupted_at(hf.plan(small[to_format], tmp_path / "out", settings), -1, settings)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage._replace(free=13_000))

    converted(small[to_format], tmp_path / "out")

    assert (tmp_path / "out").is_dir()


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A separate in-memory file system; returns a function that remounts it with other options."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root and CAP_SYS_ADMIN")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    try:
        yield remount
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to_format", BOTH)
def test_a_full_disk_is_named_and_the_same_command_resumes(
    to_format: str, small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "check_room", lambda path, needed: None)
    monkeypatch.setattr(writing, "check_room", lambda path, needed: None)
    expected = converted(small[to_format], tmp_path / "expected")
    with mounted(tmp_path / "disk", "24k") as remount:
        to = tmp_path / "disk" / "out"
        with pytest.raises(
            CheckpointError, match=r"to=.*/out cannot be written .*No space left on device.* free disk space and run"
        ):
            converted(small[to_format], to)
        assert not to.exists()

        remount("size=1m")
        finished = _finished(unfinished(to))
        converted(small[to_format], to)

        assert finished
        assert {name: written(to)[name] for name in finished} == finished
        assert_same(expected, to)


@pytest.mark.parametrize(
    "to_format", [pytest.param(BOTH[0], marks=pytest.mark.deep), pytest.param(BOTH[1], marks=pytest.mark.slow)]
)
def test_a_file_size_limit_is_a_users_error(to_format: str, small: dict[str, Path], tmp_path: Path) -> None:
    """In a separate process, as the limit applies to everything that a process writes, including its log."""
    words = [f"from={small[to_format]}", f"to={tmp_path / 'out'}"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    limited = subprocess.run(
        [sys.executable, "-m", "nemo_ext.cli", "convert", *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1])),
    )

    assert limited.returncode == 2, limited.stderr
    assert re.search(r"error: to=.*/out cannot be written .*File too large", limited.stderr)
    assert not (tmp_path / "out").exists()
    run(compose("convert", words))


@pytest.mark.parametrize("to_format", BOTH)
def test_a_read_only_folder_is_a_users_error(to_format: str, small: dict[str, Path], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as remount:
        remount("ro")
        with pytest.raises(CheckpointError, match=r"to=.*/disk/out cannot be written .*Read-only file system"):
            converted(small[to_format], tmp_path / "disk" / "out")


def test_a_file_in_the_place_of_a_folder_is_a_users_error(small: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"to=.*/file/out cannot be written .*(File exists|Not a directory)"):
        converted(small["megatron"], tmp_path / "file" / "out")


# Two processes


def test_a_second_writer_is_refused(small: dict[str, Path], tmp_path: Path) -> None:
    with only_writer(tmp_path / "out"):
        (unfinished(tmp_path / "out") / "a_part").write_text("of the first")
        with pytest.raises(CheckpointError, match=r"to=.*/out is being written by another process"):
            converted(small["megatron"], tmp_path / "out")
        assert (unfinished(tmp_path / "out") / "a_part").read_text() == "of the first"


def test_a_process_that_gets_the_lock_late_finds_the_folder_finished(
    small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first publishes after the second has checked whether the folder exists and before it gets the lock."""
    asked = iter([False])
    truth = writing.was_published
    monkeypatch.setattr(writing, "was_published", lambda *given: next(asked, None) is None and truth(*given))
    made = converted(small["megatron"], tmp_path / "out")
    before = written(made)
    asked = iter([False])
    capsys.readouterr()

    converted(small["megatron"], tmp_path / "out")

    assert capsys.readouterr().err == f"{made} is already complete\n"
    assert written(made) == before
    assert not unfinished(made).exists()


# Signals and memory, on a model of 150 MB


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("large")
    source = llama(folder / "source", hidden=512, ffn=1536, layers=23, vocabulary=4096)
    yield {"megatron": source, "huggingface": converted(source, folder / "megatron", shard_gigabytes=1, verify=False)}
    shutil.rmtree(folder)


def start(source: Path, to: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launchers" / "convert.py"), f"from={source}", f"to={to}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_parts(to: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if len(json.loads((unfinished(to) / RECORD).read_text())["done"]) >= count:
                return
        time.sleep(0.002)
    raise TimeoutError(f"{to} does not come on")


@pytest.mark.parametrize(
    ("signal_number", "to_format"),
    [
        pytest.param(signal.SIGKILL, BOTH[0], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, BOTH[1], marks=pytest.mark.deep),
    ],
)
def test_a_stopped_process_resumes_where_it_was(
    signal_number: signal.Signals,
    to_format: str,
    large: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = tmp_path / "out"
    words = [f"from={large[to_format]}", f"to={to}", "shard_gigabytes=0.002"]
    process = start(large[to_format], to, "shard_gigabytes=0.002")
    wait_for_parts(to, 3)
    process.send_signal(signal.SIGSTOP)  # otherwise it may finish before this process has looked
    with pytest.raises(CheckpointError, match="being written by another process"):
        run(compose("convert", words))
    process.send_signal(signal_number)
    process.send_signal(signal.SIGCONT)
    _, told = process.communicate(timeout=300)

    if signal_number == signal.SIGINT:
        assert told.splitlines()[-1] == "interrupted: the same command resumes", (process.returncode, told)
        assert "Traceback" not in told
    else:
        assert process.returncode == -signal.SIGKILL
    assert not to.exists()
    finished = _finished(unfinished(to))
    capsys.readouterr()
    run(compose("convert", words))

    parts = len(written(to))
    assert 3 <= len(finished) < parts
    assert f"{to}: resuming after {len(finished)} finished files\n" in capsys.readouterr().err
    assert {name: written(to)[name] for name in finished} == finished
    (uninterrupted,) = (checkpoint for made_of, checkpoint in large.items() if made_of != to_format)
    assert_same_tensors(uninterrupted, to)
    assert not list(to.glob(".*"))
    shutil.rmtree(tmp_path)


MEASURE = """
import json, sys, threading, time
from pathlib import Path
from nemo_ext.checkpoint import hf

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

small, large, folder, shard = (Path(word) for word in sys.argv[1:])
settings = hf.Settings(shard_gigabytes=float(str(shard)))

def convert(source, to):
    hf.convert(hf.plan(source, to, settings), settings, progress=False)
    return to

convert(convert(small, folder / "warm_megatron"), folder / "warm_hf")  # imports everything
start, peak, grown = anonymous(), 0, []
def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
threading.Thread(target=sample, daemon=True).start()
source = large
for name in ("megatron", "hf"):
    peak = 0
    source = convert(source, folder / name)
    grown.append(peak - start)
print(json.dumps(grown))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(large: dict[str, Path], small: dict[str, Path], tmp_path: Path) -> None:
    """The process's own memory, without pages of mapped files. A few tensors, of which the largest has 4 MB."""
    # glibc keeps freed blocks below 32 MB for later; the tensors of real models are larger and go back at once.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    words = [str(small["megatron"]), str(large["megatron"]), str(tmp_path), str(LARGE_SHARD)]

    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    to_megatron, to_hugging_face = json.loads(ended.stdout)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) >= 10
    for grown in (to_megatron, to_hugging_face):
        assert 0.25 * LARGE_SHARD * 1e9 < grown < 1.25 * LARGE_SHARD * 1e9
    print(f"grown by {to_megatron / 1e6:.0f} MB to Megatron, {to_hugging_face / 1e6:.0f} MB to Hugging Face")
    shutil.rmtree(tmp_path)
