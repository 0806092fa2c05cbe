"""Infrastructure that all jobs share: configs, settings, files, processes and progress."""
