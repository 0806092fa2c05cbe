"""Entry point of `python -m nemo_ext JOB`, which equals `nemo-ext JOB` and also works from a wheel not installed."""

from nemo_ext.cli import main

if __name__ == "__main__":
    main()
