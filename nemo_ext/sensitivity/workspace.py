"""Files of a sensitivity sweep, and the record of its inputs. Does not import torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan, weight_bytes
from nemo_ext.checkpoint.storage import fingerprint
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.job.made_of import describe, differing, note, noted
from nemo_ext.job.run_directory import CONFIG

LOG = "sensitivity.log"
REFERENCE, EVERYTHING = "as it is", "given"
"""Names of the scores of the unchanged model and of the given plan."""
LOWEST, RANDOM = "every unit in its lowest precision", ("random 1", "random 2", "random 3")
"""Names of the plans that a plan within a budget of bits is compared with; random plans use up the same bits."""
NANO = "attention and what feeds it"
"""Name of the plan that keeps `precision_plan.NANO_IN_BF16` in BF16."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Loss of the model with some units in FP8, averaged over tokens.

    Attributes:
        name: name of a single unit in FP8, of a group of units (`all M>*`), or of a plan.
        kl: KL(unchanged model || model in FP8) of the next token, in nats per token.
        loss: language model loss, in nats per token.
        tokens: number of tokens measured.
    """

    name: str
    kl: float
    loss: float
    tokens: int


def lost(score: Sensitivity, reference: Sensitivity, metric: str) -> float:
    """Return the loss of `score` relative to the unchanged model's (`reference`), in nats per token.

    With the metric `kl`, this is the score's KL divergence; with `loss`, the increase of the language model loss.
    """
    return score.kl if metric == "kl" else score.loss - reference.loss


class Workspace:
    """Paths in a sweep's run directory.

    Attributes:
        run_dir: path of the run directory.
        config: composed config that the ranks read.
        scores: scores of units and plans on the calibration set.
        result: file of measured and compared plans.
        proposal: the proposed plan as a file of the Hydra group `precision`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.config = run_dir, run_dir / CONFIG
        self.scores, self.result = run_dir / "scores.jsonl", run_dir / "plans.json"
        self.proposal = run_dir / "precision" / "proposed.yaml"

    def begin(self, config: Mapping[str, Any], checkpoint: Path) -> None:
        """Record the inputs from which the scores are computed.

        Raises:
            ValueError: existing scores were computed from other inputs.
        """
        section = config["sensitivity"]
        flags = ("data_path", "train_data_path", "valid_data_path", "split", "seq_length", "seed", "mock_data")
        made_of = {
            "checkpoint": [str(checkpoint.resolve()), fingerprint(TorchDistReader(checkpoint))],
            "precision_plan": config["precision_plan"],
            "per": section["per"],
            "calibration": section["calibration"],
            "bf16": config["megatron"].get("bf16"),
            "data": config.get("data"),
            "flags": {key: config["megatron"].get(key) for key in flags},
        }
        record = self.run_dir / "made_of.json"
        if self.scores.is_file():
            changed = differing(noted(record) or made_of, made_of)
            if any(key.startswith("checkpoint") for key in changed):
                changed = {"checkpoint": "another one"}
            if changed:
                raise ValueError(
                    f"{self.scores} was computed from other inputs ({describe(changed)}): choose another run_dir, or "
                    "remove this file"
                )
        note(record, made_of)


def as_json(score: Sensitivity, plan: Plan | None, architecture: Architecture) -> dict[str, Any]:
    """Return a compared plan's row for the file of results: its score, default precision, rules and `bytes`.

    `bytes` has the size of the weights, keyed by precision. The plan is None for the unchanged model.
    """
    held = weight_bytes(plan or Plan(), architecture)
    rules = [rule.text for rule in plan.rules] if plan is not None else []
    return {**asdict(score), "default": "bf16" if plan is None else plan.default, "rules": rules, "bytes": held}
