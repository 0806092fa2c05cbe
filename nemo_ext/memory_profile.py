"""Alias of `python -m nemo_ext.memory.sampler` under its old name."""

from nemo_ext.memory.sampler import main

if __name__ == "__main__":
    main()
