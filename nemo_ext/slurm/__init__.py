"""Jobs on Slurm: what a cluster has, checks before the queue, the batch script's part, what goes on after a stop."""
