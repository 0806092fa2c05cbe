"""Translation of an algorithm into an engine's settings, with a list of those that the engine cannot express."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_ext.job.progress import notice
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient


@dataclass(kw_only=True)
class Rendered:
    """An algorithm translated for one engine. Each of its settings is in one of the first three attributes.

    Attributes:
        settings: the engine's settings, under the engine's names.
        adapter: settings that nemo_ext applies around the engine, under the algorithm's names: rewards, environment
            shares, prompt order, and extensions of the engine.
        inexpressible: mapping from each key that neither engine nor nemo_ext can express to the reason and to what the
            engine does instead.
        by_adapter: keys that the engine cannot express but the caller handles itself.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    inexpressible: dict[str, str] = field(default_factory=dict)
    by_adapter: Collection[str] = ()

    def cannot(self, ours: str, reason: str) -> None:
        """Record why the algorithm's key `ours` cannot be expressed, unless the caller handles it."""
        if ours not in self.by_adapter:
            self.inexpressible[ours] = reason

    def surround(self, algorithm: Algorithm) -> None:
        """Fill `adapter` with the settings that nemo_ext applies around every engine.

        They have the form that `nemo_ext.rl.nemo_rl.run.run` reads.
        """
        adapter = self.adapter
        adapter["algorithm"] = algorithm.algorithm
        if not isinstance(algorithm, PolicyGradient):
            if algorithm.lengths.prompt is not None:
                adapter["max_prompt_tokens"] = algorithm.lengths.prompt
            if algorithm.online is not None:
                self.cannot(
                    "online",
                    "pairs are read from files, not generated during training; `nemo-ext online` generates, judges and "
                    "trains in rounds with TRL",
                )
            return
        adapter["environments"] = {name: use.episodes() for name, use in algorithm.environments.items()}
        if algorithm.thinking_share is not None:
            adapter["thinking_share"] = algorithm.thinking_share
        if algorithm.group is not None:
            adapter["group"] = algorithm.group.settings()

    def settled(self, on_inexpressible: Literal["error", "warn"] = "error") -> "Rendered":
        """Return self; raise ValueError if settings are inexpressible, unless `on_inexpressible` is "warn"."""
        if on_inexpressible not in ("error", "warn"):
            raise ValueError(f"on_inexpressible must be error or warn, not {on_inexpressible!r}")
        lines = [f"{key}: {reason}" for key, reason in self.inexpressible.items()]
        if lines and on_inexpressible == "error":
            listing = "".join(f"\n  {line}" for line in lines)
            raise ValueError(
                f"the engine cannot express all settings of the algorithm:{listing}\n"
                "change these settings, or accept the substitutes with on_inexpressible=warn"
            )
        for line in lines:
            notice(f"the run differs from the preset in {line}")
        return self
