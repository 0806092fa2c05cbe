"""NeMo Gym servers: `nemo-ext gym output=DIR`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["gym", *sys.argv[1:]])
