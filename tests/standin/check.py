"""`nemo_ext.megatron.check` without Megatron's own parser, whose import takes longer than a test should."""

from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import nemo_ext.megatron

_SPEC = spec_from_file_location("checks", Path(nemo_ext.megatron.__file__).with_name("check.py"))
assert _SPEC is not None and _SPEC.loader is not None
_CHECKS = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CHECKS)
globals().update({name: value for name, value in vars(_CHECKS).items() if not name.startswith("__")})


def check(config: Mapping[str, Any]) -> None:
    """Check what needs no Megatron."""
    _CHECKS.check_keys(config)
    _CHECKS.check_layout(config)
