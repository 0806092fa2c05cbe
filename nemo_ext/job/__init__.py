"""Common parts of every job: config, settings, files, processes, progress."""
