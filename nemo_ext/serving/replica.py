"""Entry point of a replica's process, configured by FOLDER/config.yaml: `python -m nemo_ext.serving.replica FOLDER`."""

import sys
from pathlib import Path

from nemo_ext.job.config import mistakes_are_one_line
from nemo_ext.job.run_directory import CONFIG, read_config

if __name__ == "__main__":
    from nemo_ext.serving.job import run

    with mistakes_are_one_line():
        run(read_config(Path(sys.argv[1]) / CONFIG))
