"""Preference data: `nemo-ext preference_data preset=domyn sources.heuristic.strong=... output=pairs/domyn`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["preference_data", *sys.argv[1:]])
