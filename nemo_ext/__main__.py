"""`python -m nemo_ext JOB`, the same as `nemo-ext JOB`: also from a wheel that is not installed."""

from nemo_ext.cli import main

if __name__ == "__main__":
    main()
