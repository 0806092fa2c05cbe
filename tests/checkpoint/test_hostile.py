"""Pickles that run a program when they are read, in every place of a checkpoint where a reader finds one.

Each of them makes a file when it runs; tests check that the file does not exist afterwards.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from nemo_ext.checkpoint import hf, merge
from nemo_ext.checkpoint.pickles import COMMON, FORCED, Unsafe, check_objects, only_data, read_metadata
from nemo_ext.checkpoint.sound import fall_back
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import METADATA, TRACKER, TorchDistReader, TorchDistWriter, whole_files
from nemo_ext.data.curriculum.layout import read_order
from nemo_ext.megatron.check import check_objects as check_of_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


LOAD_FROM_BYTES = torch.storage._load_from_bytes


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def text(word: str) -> bytes:
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def named(module: str, name: str) -> bytes:
    """Opcodes that push an attribute of a module; the name may have dots."""
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def of_opcodes(opcodes: bytes) -> bytes:
    return b"\x80\x04" + opcodes + b"."


def touch(marker: Path) -> bytes:
    return text(f"touch {marker}")


RUNS: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda marker: pickle.dumps(Calls(os.system, f"touch {marker}")),
    "an old protocol": lambda marker: pickle.dumps(Calls(os.system, f"touch {marker}"), protocol=0),
    "eval": lambda marker: pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w').close()")),
    "exec": lambda marker: pickle.dumps(Calls(exec, f"open({str(marker)!r}, 'w').close()")),
    "a chain of getattr": lambda marker: of_opcodes(
        called(
            called(named("builtins", "getattr"), called(named("builtins", "__import__"), text("os")), text("system")),
            touch(marker),
        )
    ),
    "dots through a module that is needed": lambda marker: of_opcodes(
        called(named("torch.distributed.checkpoint.filesystem", "os.system"), touch(marker))
    ),
    "dots through pathlib": lambda marker: of_opcodes(called(named("pathlib", "os.system"), touch(marker))),
    "dots through torch": lambda marker: of_opcodes(called(named("torch", "serialization.os.system"), touch(marker))),
    "torch.load inside": lambda marker: pickle.dumps(
        Calls(torch.storage._load_from_bytes, saved(Calls(os.system, f"touch {marker}")))
    ),
    "in a storage record": lambda marker: pickle.dumps(
        Metadata({}, storage_data={MetadataIndex("w"): Calls(os.system, f"touch {marker}")})
    ),
    "as a record's state": lambda marker: of_opcodes(
        named("torch.distributed.checkpoint.metadata", "StorageMeta")
        + b")\x81"
        + called(named("os", "system"), touch(marker))
        + b"b"
    ),
    "in a key": lambda marker: pickle.dumps(Metadata({"w": 1}, planner_data={Calls(os.system, f"touch {marker}"): 0})),
}
"""Pickles by what they do."""


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 10 and 20, each with a tensor and an object."""
    folder = tmp_path_factory.mktemp("whole")
    for step in (10, 20):
        writer = FileSystemWriter(folder / f"iter_{step:07d}")
        save({"w": torch.full((8,), float(step)), "state": f"of step {step}"}, storage_writer=writer, no_dist=True)
    (folder / TRACKER).write_text("20")
    return folder


@pytest.fixture
def checkpoints(whole: Path, tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


@pytest.mark.parametrize("kind", RUNS)
def test_the_pickles_run_without_protection(kind: str, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Separate processes, as an earlier test may have imported Megatron in this one.
    monkeypatch.delenv(FORCED, raising=False)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", LOAD_FROM_BYTES)
    with suppress(TypeError, AttributeError, pickle.UnpicklingError):  # the return value is not the state of a record
        pickle.loads(RUNS[kind](marker))

    assert marker.exists()


@pytest.mark.parametrize("kind", RUNS)
def test_metadata_are_read_without_running_them(kind: str, marker: Path, checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000020"
    (newest / METADATA).write_bytes(RUNS[kind](marker))

    with pytest.raises(Unsafe, match=r"iter_0000020/\.metadata names .*none of it ran"):
        read_metadata(newest)

    assert not marker.exists()


@pytest.mark.parametrize(
    "command",
    [
        lambda checkpoints: hf.plan(checkpoints, checkpoints / "out", hf.Settings()),
        lambda checkpoints: hf.plan(checkpoints.parent, checkpoints / "out", hf.Settings(iteration=20)),
        lambda checkpoints: merge.plan([checkpoints] * 2, checkpoints / "out", merge.Settings()),
        lambda checkpoints: TorchDistReader(checkpoints / "iter_0000020"),
        lambda checkpoints: check_of_run({"run_dir": str(checkpoints.parent), "megatron": {}}),
        lambda checkpoints: check_of_run(
            {"run_dir": str(checkpoints / "new"), "megatron": {"pretrained_checkpoint": str(checkpoints)}}
        ),
        lambda checkpoints: check_of_run(
            {"run_dir": str(checkpoints / "new"), "megatron": {}, "distillation": {"teacher": str(checkpoints.parent)}}
        ),
    ],
    ids=["convert", "convert a run", "merge", "reader", "resume", "start from", "teacher"],
)
def test_commands_refuse_malicious_metadata(command: Callable[[Path], object], marker: Path, checkpoints: Path) -> None:
    (checkpoints / "iter_0000020" / METADATA).write_bytes(RUNS["in a storage record"](marker))

    with pytest.raises(ValueError, match=r"names \w+\.system, which checkpoint records never need"):
        command(checkpoints)

    assert not marker.exists()


def test_a_resumed_run_uses_the_previous_checkpoint(marker: Path, checkpoints: Path) -> None:
    (checkpoints / "iter_0000020" / METADATA).write_bytes(RUNS["os.system"](marker))

    said = fall_back(checkpoints)

    assert said is not None and "none of it ran" in said and "resuming from iter_0000010" in said
    assert not marker.exists()


def set_on(target: bytes, name: str, value: bytes) -> bytes:
    """A pickle that sets an attribute of an object."""
    return of_opcodes(target + b"N}" + text(name) + value + b"s\x86b")


INDEX = named("torch.distributed.checkpoint.metadata", "MetadataIndex")
MEMBER = called(named("torch.distributed.checkpoint.planner", "WriteItemType"), b"K\x02")


@pytest.mark.parametrize(
    "content",
    [
        set_on(INDEX, "fqn", named("pathlib", "Path")),
        set_on(INDEX, "__hash__", text("x")),
        set_on(INDEX, "__name__", text("x")),
        set_on(named("pathlib", "PosixPath"), "__bases__", named("pathlib", "PurePosixPath") + b"\x85"),
        set_on(MEMBER, "_value_", b"K\x07"),
    ],
)
def test_classes_and_members_of_enums_keep_their_attributes(content: bytes, checkpoints: Path) -> None:
    def state() -> list[object]:
        own = (PosixPath.__bases__, MetadataIndex.__name__)
        return [dict(vars(MetadataIndex)), *own, dict(vars(WriteItemType.SHARD))]

    before = state()
    (checkpoints / "iter_0000020" / METADATA).write_bytes(content)

    with pytest.raises(Unsafe, match="sets attributes of a class"):
        read_metadata(checkpoints / "iter_0000020")

    assert state() == before


@pytest.mark.parametrize("content", [b"\x80\x04X\x01\x00\x00\x00aQ.", b"\x80\x04N.", b"", b"\x80"], ids=repr)
def test_other_pickles_are_not_accepted_as_metadata(content: bytes, checkpoints: Path) -> None:
    (checkpoints / "iter_0000020" / METADATA).write_bytes(content)

    with pytest.raises(CheckpointError, match=r"\.metadata .*copy it again"):
        whole_files(checkpoints / "iter_0000020")


def test_metadata_name_only_files_of_their_folder(checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000020"
    metadata = read_metadata(newest)
    for info in metadata.storage_data.values():
        info.relative_path = f"../iter_0000010/{info.relative_path}"
    (newest / METADATA).write_bytes(pickle.dumps(metadata))

    with pytest.raises(Unsafe, match=r"names \.\./iter_0000010/\S+, which is not in its folder"):
        whole_files(newest)


def with_object(checkpoints: Path, value: object) -> Path:
    """The newest checkpoint, with another object among its shards."""
    newest = checkpoints / "iter_0000020"
    save({"w": torch.zeros(8), "state": value}, storage_writer=FileSystemWriter(newest), no_dist=True)
    return newest


def test_objects_of_a_complete_checkpoint_are_accepted(checkpoints: Path) -> None:
    for newest in (checkpoints / "iter_0000020", with_object(checkpoints, [None, {"seed": torch.arange(3)}])):
        check_objects(newest, whole_files(newest))


def test_arrays_are_accepted_after_another_library_unregistered_them(megatron: None, checkpoints: Path) -> None:
    with_object(checkpoints, np.arange(3, dtype=np.uint32))
    with torch.serialization.safe_globals([np.ndarray]):  # as transformers' Trainer does when it resumes
        pass

    check_of_run({"run_dir": str(checkpoints.parent), "megatron": {}})


def test_malicious_objects_in_shards_are_not_run(megatron: None, marker: Path, checkpoints: Path) -> None:
    newest = with_object(checkpoints, Calls(os.system, f"touch {marker}"))

    with pytest.raises(Unsafe, match=r"\.distcp \(state\) names \w+\.system"):
        check_of_run({"run_dir": str(checkpoints.parent), "megatron": {}})

    assert TorchDistReader(newest).read("w").eq(0).all()  # the weights alone need none of it
    assert not marker.exists()


def test_the_user_may_allow_an_object(marker: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = with_object(checkpoints, Calls(os.system, f"touch {marker}"))
    monkeypatch.setenv(FORCED, "0")

    check_objects(newest, whole_files(newest))

    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_common_state_is_not_run(zipped: bool, marker: Path, checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000020"
    evil = saved({"args": Calls(os.system, f"touch {marker}")}, _use_new_zipfile_serialization=zipped)
    (newest / COMMON).write_bytes(evil)

    with pytest.raises(Unsafe, match=r"common\.pt names \w+\.system"):
        check_objects(newest, whole_files(newest))

    assert not marker.exists()


def test_a_torchscript_archive_as_common_state_is_not_run(checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000020"
    torch.jit.save(torch.jit.script(torch.nn.Identity()), newest / COMMON)

    with pytest.raises(Unsafe, match="none of it ran"):
        check_objects(newest, whole_files(newest))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a rank is."""
    monkeypatch.setattr(FileSystemReader, "read_metadata", FileSystemReader.read_metadata)  # put back afterwards
    monkeypatch.setenv(FORCED, "1")
    only_data()


def test_torch_runs_the_object_without_the_guard(
    marker: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORCED, raising=False)
    newest = with_object(checkpoints, Calls(os.system, f"touch {marker}"))

    load({"w": torch.zeros(8), "state": None}, storage_reader=FileSystemReader(newest), no_dist=True)

    assert marker.exists()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("where", ["object", "metadata"])
def test_torch_does_not_run_the_object_in_a_rank(where: str, marker: Path, checkpoints: Path) -> None:
    newest = checkpoints / "iter_0000020"
    if where == "object":
        with_object(checkpoints, Calls(os.system, f"touch {marker}"))
    else:
        (newest / METADATA).write_bytes(RUNS["os.system"](marker))

    with pytest.raises(CheckpointException):
        load({"w": torch.zeros(8), "state": None}, storage_reader=FileSystemReader(newest), no_dist=True)

    assert not marker.exists()


@pytest.mark.usefixtures("guarded")
def test_a_rank_reads_a_complete_checkpoint_as_torch_does(checkpoints: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(8), "state": None}

    load(state, storage_reader=FileSystemReader(checkpoints / "iter_0000020"), no_dist=True)

    assert state["w"].eq(20).all() and state["state"] == "of step 20"


def test_a_malicious_conversion_record_is_not_run(marker: Path, tmp_path: Path) -> None:
    writer = TorchDistWriter(tmp_path / "release", [])

    with pytest.raises(Unsafe, match=r"names \w+\.system"):
        writer.finish([RUNS["os.system"](marker).hex()], {})

    assert not marker.exists()


def test_malicious_arrays_are_not_run(marker: Path, tmp_path: Path) -> None:
    order = tmp_path / "domains" / "order.npz"
    order.parent.mkdir()
    np.savez(order, domain=np.zeros((1, 1)), names=np.array([Calls(os.system, f"touch {marker}")], dtype=object))

    with pytest.raises(ValueError, match="domain, names cannot be read"):
        read_order(tmp_path)

    assert not marker.exists()
