"""Pipelines of jobs, which are parsed from a file, then queued on Slurm or run on this machine."""
