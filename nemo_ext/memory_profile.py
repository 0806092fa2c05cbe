"""The old place of `python -m nemo_ext.memory.sampler`."""

import sys

from nemo_ext.memory.sampler import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
