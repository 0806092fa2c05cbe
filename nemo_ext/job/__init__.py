"""What every job is made of: config, settings, files, processes, progress."""
