"""The parts of a training job that require Megatron, run in separate processes and possibly in a container.

python -m nemo_ext.slurm.prepare compose OUT recipe=... key=value      composes and checks the config, and writes it
python -m nemo_ext.slurm.prepare report RUN_DIR                        writes the run's report
"""

import json
import sys
from pathlib import Path

from nemo_ext.job.config import check_choice, compose, mistakes_are_one_line
from nemo_ext.job.files import write_text
from nemo_ext.job.run_directory import last_checkpoint, read_config


def prepared(words: list[str]) -> dict[str, object]:
    """Compose a training run's config from the arguments `words`, check it, and write it.

    Returns:
        `run_dir`, `config` (path of the config), `step` (of the newest complete checkpoint), `target` (step at
        which this launch ends), and `notice` (messages about a corrupt checkpoint, and about differences between the
        recipe and its published source; "" if there are none).

    Raises:
        ValueError: the config is invalid or does not fit this machine or the run so far.
    """
    from nemo_ext.evaluation.live import check_machine
    from nemo_ext.launch import not_reproduced, prepare, repaired
    from nemo_ext.megatron.check import check_launcher
    from nemo_ext.megatron.run import target_of

    check_choice("recipe", words)
    config = compose("train", words)
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: set it to a directory, such as runs/mine")
    check_machine(config)
    check_launcher(config)
    run_dir = Path(str(config["run_dir"]))
    notices = [*repaired(config), *not_reproduced(config)]
    path = prepare(config)
    target, _ = target_of(read_config(path))
    return {
        "run_dir": str(run_dir),
        "config": str(path),
        "step": last_checkpoint(run_dir) or 0,
        "target": target,
        "notice": "\n".join(notices),
    }


def main() -> None:
    """Run the command `compose` or `report` (see the module); a user error is printed as one line with exit code 2."""
    verb, place, *words = sys.argv[1:]
    with mistakes_are_one_line():
        if verb == "compose":
            write_text(Path(place), json.dumps(prepared(words)))
        else:
            from nemo_ext.megatron.report import write_report
            from nemo_ext.slurm.timeline import add_section

            report = write_report(Path(place))
            add_section(report)
            print(f"report: {report}")


if __name__ == "__main__":
    main()
