"""Entry point of `python -m nemo_ext JOB`, which equals `nemo-ext JOB` and can even run from an uninstalled wheel."""

from nemo_ext.cli import main

if __name__ == "__main__":
    main()
