"""Old name of `nemo_ext.memory.sampler`, kept for `python -m nemo_ext.memory_profile`."""

from nemo_ext.memory.sampler import main

if __name__ == "__main__":
    main()
