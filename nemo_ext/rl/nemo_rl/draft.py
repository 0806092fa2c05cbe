"""Draft of the changes to NeMo-RL's example config that express an algorithm."""

from typing import Any

from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.nemo_rl.checkout import Checkout, Section
from nemo_ext.rl.rendering import Rendered


def section_of(algorithm: Algorithm) -> Section:
    """Return the name of the algorithm's section in NeMo-RL's master config: grpo, distillation or dpo."""
    if not isinstance(algorithm, PolicyGradient):
        return "dpo"
    return "grpo" if algorithm.logits is None else "distillation"


class Draft(Rendered):
    """Draft of NeMo-RL's settings; keys that this version does not have are recorded, with the nearest key."""

    def __init__(self, checkout: Checkout, algorithm: Algorithm) -> None:
        super().__init__()
        self.keys = checkout.keys(section_of(algorithm))
        self.surround(algorithm)

    def has(self, path: str) -> bool:
        """Return whether this version of NeMo-RL has the key at a dotted path."""
        return self.keys.missing(path) is None

    def put(self, ours: str, path: str, value: Any) -> None:
        """Set NeMo-RL's key at `path`, which implements the algorithm's key `ours`."""
        if missing := self.keys.missing(path):
            self.cannot(ours, f"this version of NeMo-RL has {missing}")
        else:
            put(self.settings, path, value)

    def put_all(self, ours: str, above: str, values: dict[str, Any]) -> None:
        """Set several keys in NeMo-RL's section `above` that together implement the algorithm's key `ours`."""
        for key, value in values.items():
            self.put(ours, f"{above}.{key}", value)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, in place, creating missing sections."""
    *above, last = path.split(".")
    for word in above:
        config = config.setdefault(word, {})
    config[last] = value
