"""`nemo_ext.checkpoint.sound` for checkpoints of ranks that are stand-ins, which hold a state in place of tensors."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nemo_ext.checkpoint

_SPEC = spec_from_file_location("sound", Path(nemo_ext.checkpoint.__file__).with_name("sound.py"))
assert _SPEC is not None and _SPEC.loader is not None
_SOUND = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_SOUND)


def problem_of(folder: Path) -> str | None:
    """Without torch, which takes seconds to import."""
    return None if (folder / "state").is_file() else f"{folder}: no state"


_SOUND.problem_of = problem_of  # type: ignore[attr-defined]
back_to, by_step, fall_back, newest_before = _SOUND.back_to, _SOUND.by_step, _SOUND.fall_back, _SOUND.newest_before
