"""Jobs on Slurm: site descriptions, checks before submission, the batch script's work, and restarts after a stop."""
