"""Draft of changes to an example config of NeMo-RL."""

from typing import Any

from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.nemo_rl.checkout import Checkout, Section
from nemo_ext.rl.rendering import Rendered


def section_of(algorithm: Algorithm) -> Section:
    """Section of NeMo-RL's master config for an algorithm: grpo or dpo."""
    return "grpo" if isinstance(algorithm, PolicyGradient) else "dpo"


class Draft(Rendered):
    """Draft of NeMo-RL's settings; keys that the version does not have are recorded with the nearest."""

    def __init__(self, checkout: Checkout, algorithm: Algorithm) -> None:
        super().__init__()
        self.keys = checkout.keys(section_of(algorithm))
        self.surround(algorithm)

    def has(self, path: str) -> bool:
        """True if the version has a key."""
        return self.keys.missing(path) is None

    def put(self, ours: str, path: str, value: Any) -> None:
        """Set a key of NeMo-RL for a key of the algorithm."""
        if missing := self.keys.missing(path):
            self.cannot(ours, f"this version of NeMo-RL has {missing}")
        else:
            put(self.settings, path, value)

    def put_all(self, ours: str, above: str, values: dict[str, Any]) -> None:
        """Set several keys of a section for one key of the algorithm."""
        for key, value in values.items():
            self.put(ours, f"{above}.{key}", value)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a nested value by its dotted path."""
    *above, last = path.split(".")
    for word in above:
        config = config.setdefault(word, {})
    config[last] = value
