"""A teacher's vocabulary, and the divergence from teachers, for all engines of on-policy distillation."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.rl.algorithms import Logits

if TYPE_CHECKING:
    from torch import Tensor


def check_vocabulary(name: str, folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> None:
    """Raise ValueError if a teacher's tokens differ from the policy's, since it could not score what was sampled.

    Args:
        name: name of the teacher.
        folder: its Hugging Face folder.
        tokenizer: Hugging Face tokenizer of the policy.
        trust_remote_code: whether Python files in the folder may run.

    Raises:
        ValueError: the vocabularies differ; the message has the number of differing tokens and the first one.
    """
    theirs = import_module("transformers").AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    different = sorted(token for token in ours.keys() | other.keys() if ours.get(token) != other.get(token))
    if different:
        raise ValueError(
            f"rl.distillation.teachers.{name}={folder}: its vocabulary differs from the policy's in "
            f"{len(different):,} tokens, such as {different[0]!r}; on-policy distillation requires the same tokens; "
            "choose a teacher with the policy's vocabulary"
        )


def divergences(
    names: Sequence[str], teachers: "Tensor", policy: "Tensor", generated: "Tensor"
) -> Mapping[str, tuple[float, int]]:
    """Map each teacher to the sum of its tokens' estimated KL divergences, in nats, and the number of tokens.

    The estimate of KL(policy || teacher) is k3 (http://joschu.net/blog/kl-approx.html).

    Args:
        names: name of each row's teacher.
        teachers: log-probabilities by the teachers, `[rows, tokens]`.
        policy: log-probabilities by the policy, `[rows, tokens]`.
        generated: 1 for tokens that the policy generated, `[rows, tokens]`.
    """
    sums: dict[str, tuple[float, int]] = {}
    difference = (teachers - policy).double() * generated
    by_row = (difference.exp() - difference - 1).sum(dim=1).tolist()
    for name, divergence, count in zip(names, by_row, generated.sum(dim=1).tolist(), strict=True):
        total, tokens = sums.get(name, (0.0, 0))
        sums[name] = total + divergence, tokens + int(count)
    return sums


def divergence(policy: "Tensor", teacher: "Tensor", settings: Logits) -> "Tensor":
    """Return the divergence of the policy's distribution from the teacher's at each token, `[rows, tokens]`, in nats.

    As in NeMo-RL's DistillationLossFn, both distributions are normalised among the teacher's most likely tokens.

    Args:
        policy: logits of the policy, `[rows, tokens, vocabulary]`.
        teacher: logits of the teacher, `[rows, tokens, vocabulary]`.
        settings: number of tokens, and the share of the forward divergence.
    """
    if settings.top_k is not None:
        teacher, places = teacher.topk(min(settings.top_k, teacher.shape[-1]))
        policy = policy.gather(-1, places)
    ours, theirs = (logits.float().log_softmax(-1) for logits in (policy, teacher))
    forward, reverse = settings.forward_share, 1 - settings.forward_share
    weights: Tensor = forward * theirs.exp() - reverse * ours.exp()
    return (weights * (theirs - ours)).sum(-1)
