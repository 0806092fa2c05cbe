"""One thin script a job; `nemo-ext JOB key=value` is `python launchers/JOB.py key=value`."""
