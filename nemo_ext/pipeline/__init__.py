"""Jobs that follow each other: read from a pipeline's file, queued on Slurm, or run on this machine."""
