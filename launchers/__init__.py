"""One thin script per job; `nemo-ext JOB key=value` is the same as `python launchers/JOB.py key=value`."""
