"""Files of a curriculum that are damaged or not a curriculum's."""

from pathlib import Path

import numpy as np
import pytest

from nemo_ext.data.curriculum.layout import ARRAYS, stored_arrays


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / ARRAYS
    said = rf"{path} is damaged, or does not belong to a curriculum \(key, used cannot be read .*give the directory"

    np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match=said):
        stored_arrays(path, "key", "used")
    for content in (b"no archive", b"", path.read_bytes()[:100], b"PK\x03\x04" + b"0" * 60):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            stored_arrays(path, "key", "used")
    np.savez(path, key=np.arange(2), used=np.array([{"pickled": 1}], dtype=object))
    with pytest.raises(ValueError, match=said):
        stored_arrays(path, "key", "used")

    np.savez(path, key=np.arange(2), used=np.ones(2))
    assert [each.tolist() for each in stored_arrays(path, "key", "used")] == [[0, 1], [1.0, 1.0]]
