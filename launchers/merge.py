"""Average checkpoints: `nemo-ext merge 'from=[a,b,c]' to=soup`, or `'points=[0,0.5,1]'` on the line between two."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and averages on this machine."""

    def job(config: dict[str, object]) -> None:
        require("torch")
        from nemo_ext.checkpoint.merge import run

        run(config)

    run_job("merge", job, resumable=True)


if __name__ == "__main__":
    main()
