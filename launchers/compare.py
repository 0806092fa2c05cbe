"""Compare: `nemo-ext compare 'runs=[runs/before,runs/after]' paper=domyn_small output=runs/compare`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["compare", *sys.argv[1:]])
