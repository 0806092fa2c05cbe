"""Infrastructure shared by all jobs: configs, settings, files, processes, progress."""
