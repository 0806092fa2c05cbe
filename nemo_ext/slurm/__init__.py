"""Jobs on Slurm: site descriptions, checks before submission, the batch script's part, restarts after a stop."""
