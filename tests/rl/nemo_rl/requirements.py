"""Print the requirements of a NeMo-RL checkout that CPU tests import, pinned as in its pyproject.toml.

python tests/rl/nemo_rl/requirements.py CHECKOUT      # for `make nemo_rl`

Packages that only GPUs need (vLLM, Transformer Engine, NIXL, ...) and packages from git are omitted.
"""

import re
import sys
import tomllib
from pathlib import Path

IMPORTED = {
    "accelerate",
    "colored",
    "datasets",
    "hydra-core",
    "math-verify",
    "mlflow",
    "nvidia-ml-py",
    "omegaconf",
    "pillow",
    "plotly",
    "pyzmq",
    "ray",
    "sentencepiece",
    "soundfile",
    "swanlab",
    "sympy",
    "tensorboard",
    "tensordict",
    "tiktoken",
    "torch",
    "torchdata",
    "transformers",
    "wandb",
}
"""Packages that the modules under test import, directly or when NeMo-RL logs."""


def requirements(checkout: Path) -> list[str]:
    """Pinned requirements in the order of the checkout."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    names = [(re.split(r"[^\w.-]", each, maxsplit=1)[0].lower(), each) for each in project["dependencies"]]
    return [each for name, each in names if name in IMPORTED and "@" not in each]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]))))
