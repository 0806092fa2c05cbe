"""An algorithm rendered for one engine, with the settings that could not be expressed."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_ext.job.progress import notice
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient


@dataclass(kw_only=True)
class Rendered:
    """An algorithm rendered for one engine. Every setting of the algorithm is in one of the first three.

    Attributes:
        settings: settings of the engine, under its names.
        adapter: settings that nemo_ext applies around the engine, in the algorithm's names: rewards, shares of
            environments, the order of prompts, and additions to the engine.
        inexpressible: key of the algorithm -> why neither can express it, and what `settings` do instead.
        by_adapter: keys that the engine cannot express and the caller handles.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    inexpressible: dict[str, str] = field(default_factory=dict)
    by_adapter: Collection[str] = ()

    def cannot(self, ours: str, reason: str) -> None:
        """Note a setting of the algorithm that is not expressed."""
        if ours not in self.by_adapter:
            self.inexpressible[ours] = reason

    def surround(self, algorithm: Algorithm) -> None:
        """Note what lies around every engine.

        `environments` and `group` of the adapter are in the words of `nemo_ext.rl.nemo_rl.run.run`; `data` is for
        whoever makes the files: `shares` of environments, `thinking_share`, `drop_from` and `easy_to_hard` of
        `nemo-ext curriculum`, `max_prompt_tokens` of `nemo-ext preference_data`, `rounds` to train, each on new pairs.
        """
        adapter = self.adapter
        adapter["algorithm"] = algorithm.algorithm
        if not isinstance(algorithm, PolicyGradient):
            rounds = algorithm.online.rounds if algorithm.online else algorithm.rounds
            adapter["data"] = {"max_prompt_tokens": algorithm.lengths.prompt, "rounds": rounds}
            if algorithm.online is not None:
                self.cannot(
                    "online",
                    "pairs are read, not generated while training; "
                    "`nemo-ext online` generates, judges and trains in rounds with TRL",
                )
            return
        adapter["environments"] = {
            name: {"reward": use.reward, **({"settings": dict(use.settings)} if use.settings else {})}
            for name, use in algorithm.environments.items()
        }
        adapter["data"] = {
            "shares": {name: use.weight for name, use in algorithm.environments.items()},
            "thinking_share": algorithm.thinking_share,
            "drop_from": algorithm.curriculum.drop_from,
            "easy_to_hard": algorithm.curriculum.easy_to_hard,
        }
        if algorithm.group is not None:
            adapter["group"] = algorithm.group.settings()

    def settled(self, on_inexpressible: Literal["error", "warn"] = "error") -> "Rendered":
        """Returns itself if everything is expressed, or if `warn` accepts the substitutes.

        Raises:
            ValueError: some settings are not expressed; lists them with reasons.
        """
        if on_inexpressible not in ("error", "warn"):
            raise ValueError(f"on_inexpressible must be error or warn, not {on_inexpressible!r}")
        lines = [f"{key}: {reason}" for key, reason in self.inexpressible.items()]
        if lines and on_inexpressible == "error":
            told = "".join(f"\n  {line}" for line in lines)
            raise ValueError(
                f"the engine cannot do all that the algorithm says:{told}\n"
                "change these settings, or accept what is done instead with on_inexpressible=warn"
            )
        for line in lines:
            notice(f"not as the algorithm says: {line}")
        for key, value in self.adapter.get("data", {}).items():
            if value and key != "shares":
                notice(f"for the data to have, nothing here changes them: {key}={value}")
        return self
