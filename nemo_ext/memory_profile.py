"""The old place of `python -m nemo_ext.memory.sampler`."""

from nemo_ext.memory.sampler import main

if __name__ == "__main__":
    main()
