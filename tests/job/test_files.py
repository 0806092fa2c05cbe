import os
import subprocess
from pathlib import Path

import pytest

from nemo_ext.job.files import no_room, write_text


def test_readers_see_the_previous_file_until_a_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_text(path, "before")

    with path.open() as reader:
        write_text(path, "after")
        assert reader.read() == "before"

    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("OSError: [Errno 122] Disk quota exceeded: 'x'", True),
        ("RuntimeError: [enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0", True),
        ("RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed", True),
        ("OSError: [Errno 5] Input/output error", False),
        ("", False),
    ],
)
def test_errors_of_a_full_disk_are_recognized(error: str, full: bool, tmp_path: Path) -> None:
    place = tmp_path / "not" / "there"

    assert no_room(place, f"a step\n{error}\n") == (f"no space left: {error}" if full else "")


@pytest.mark.parametrize("options", ["size=1m", "size=4m,nr_inodes=4"])
def test_a_full_disk_is_reported(options: str, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root and CAP_SYS_ADMIN")
    try:
        assert no_room(tmp_path) == ""
        for name in ("a", "b", "c"):
            (tmp_path / name).write_bytes(bytes(4096))

        lacks = "inode" if "inodes" in options else "space"
        assert no_room(tmp_path / "run") == f"no {lacks} left in {tmp_path / 'run'}"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
