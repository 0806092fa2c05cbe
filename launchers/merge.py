"""Average checkpoints: `nemo-ext merge 'from=[a,b,c]' to=soup`, or `'points=[0,0.5,1]'` to interpolate."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["merge", *sys.argv[1:]])
