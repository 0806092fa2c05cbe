"""Convert: `nemo-ext convert from=... to=...`, checkpoints between Hugging Face and Megatron."""

import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and converts on this machine."""

    def job(config: dict[str, Any]) -> None:
        require("torch")
        from nemo_ext.checkpoint.convert import run

        if not config["parity"]["prompts"]:
            run(config)
            return
        require("torch", "megatron-core")
        from nemo_ext import parity

        settings = parity.read_settings(config)
        run(config)
        if settings is not None and not config["dry_run"]:
            parity.run(config, settings)

    run_job("convert", job, resumable=True)


if __name__ == "__main__":
    main()
