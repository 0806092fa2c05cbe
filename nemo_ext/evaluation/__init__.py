"""Reports and plots of runs."""
