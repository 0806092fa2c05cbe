"""Blend: what each stream of a blend gets, `nemo-ext blend data=domyn_cpt tokens=503e9 [output=DIR]`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, prints the blend's audit and writes its files."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.blends.job import audit

        audit(config)

    # A recipe brings data, which data=NAME then replaces; without one it is added, which Hydra spells with a plus.
    if not any(word.lstrip("+").startswith("recipe=") for word in sys.argv):
        sys.argv = [f"+{word}" if word.startswith("data=") else word for word in sys.argv]
    run_job("blend", job)


if __name__ == "__main__":
    main()
