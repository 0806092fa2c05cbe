"""Quantize: `nemo-ext quantize from=... to=... precision=... calibration.data=...`, FP8 after training."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, calibrates, quantises and exports on this machine."""

    def job(config: dict[str, object]) -> None:
        require("torch")
        from nemo_ext.quantization.job import run

        run(config)

    run_job("quantize", job, resumable=True)


if __name__ == "__main__":
    main()
