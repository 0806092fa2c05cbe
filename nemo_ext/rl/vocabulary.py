"""Check of a teacher's vocabulary, for all engines of on-policy distillation."""

from importlib import import_module
from pathlib import Path
from typing import Any


def check_vocabulary(name: str, folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> None:
    """Raise ValueError if a teacher's tokens differ from the policy's, since it could not score what was sampled.

    Raises:
        ValueError: the vocabularies differ; the message has the number of differing tokens and the first one.
    """
    theirs = import_module("transformers").AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    different = sorted(token for token in ours.keys() | other.keys() if ours.get(token) != other.get(token))
    if different:
        raise ValueError(
            f"rl.distillation.teachers.{name}={folder}: its vocabulary differs from the policy's in "
            f"{len(different):,} tokens, such as {different[0]!r}; on-policy distillation requires the same tokens"
        )
