"""Verifier with the published checkers of IFEval (arXiv:2311.07911) and of IFBench's test set (arXiv:2507.02833).

For evaluation only: some checkers reward doing nothing, some raise on an answer (`error`), and IFBench's rules are held
out from training. RL has the environment `instructions`. Answers of more than `MAX_CHARACTERS` follow no instruction,
as some checkers take quadratic time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import STRICT, checked, nearest
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Metric, Verdict
from nemo_ext.rl.verifiers.instructions import MAX_CHARACTERS


@dataclass(frozen=True)
class Library:
    """Published checkers: their registry's module, the NLTK data that they require, and the command to install them."""

    module: str
    data: tuple[str, ...]
    install: str


LIBRARIES = {
    "ifeval": Library(
        "lm_eval.tasks.ifeval.instructions_registry", ("tokenizers/punkt_tab",), "pip install 'nemo_ext[harness]'"
    ),
    "ifbench": Library(
        "ifbench.instructions_registry",
        ("tokenizers/punkt", "tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng"),
        "pip install git+https://github.com/allenai/IFBench",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction in a prompt: its published id, and its parameters without the empty ones."""

    id: str
    kwargs: Annotated[
        Mapping[str, Any],
        BeforeValidator(lambda given: {key: value for key, value in (given or {}).items() if value is not None}),
    ] = field(default_factory=dict)
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Instructions that a response is checked against, and the prompt that contains them."""

    instructions: Annotated[tuple[Instruction, ...], Field(min_length=1)]
    prompt: str


def check(reference: Mapping[str, Any], *, known: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {instructions: [{id, kwargs}], prompt: string}.

    Raises:
        ValueError: the reference is invalid, or has an id without a checker in `known`.
    """
    parsed = checked(Reference, reference, where="reference", strict=True)
    for instruction in parsed.instructions:
        if instruction.id not in known:
            raise ValueError(f"reference: unknown instruction id {instruction.id!r}: {nearest(instruction.id, known)}")
    return parsed


def verify(response: Response, reference: Reference, *, checkers: Mapping[str, Any]) -> Verdict:
    """Return the verdict `correct` if the answer follows all instructions (strict); `error` if a checker raises.

    Further metrics, as in IFEval's section 3: `loose`, and the shares of all instructions, `instruction_strict` and
    `instruction_loose`. The loose metrics also accept the answer without its first or last line or without asterisks.

    Args:
        checkers: mapping from id to the checker's class.
    """
    answer = response.answer
    lines = answer.split("\n")
    parts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    variants = [*parts, *(part.replace("*", "") for part in parts)] if len(answer) <= MAX_CHARACTERS else [""]
    strict, loose = [], []
    for instruction in reference.instructions:
        try:
            checker = checkers[instruction.id](instruction.id)
            checker.build_description(**instruction.kwargs)
            if "prompt" in (checker.get_instruction_args() or ()):
                checker.build_description(prompt=reference.prompt)
            followed = (bool(text.strip() and checker.check_following(text)) for text in variants)
            strict.append(next(followed))
            loose.append(strict[-1] or any(followed))
        except Exception as error:
            return Verdict.error(f"the published checker {instruction.id} raised {type(error).__name__}: {error}"[:200])
    total = len(strict)
    more: dict[str, Metric] = {
        "loose": float(all(loose)),
        "instruction_strict": (sum(strict), total),
        "instruction_loose": (sum(loose), total),
    }
    if all(strict):
        return replace(Verdict.correct(), more=more)
    broken = [each.id for each, followed in zip(reference.instructions, strict, strict=True) if not followed]
    why = f"{len(broken)} of {total} instructions not followed: {', '.join(broken)}"
    return replace(Verdict.wrong(why), more=more)


def environment(*, library: str) -> Environment:
    """Create the environment `published_instructions`, for evaluation with the published checkers.

    Args:
        library: `ifeval`, lm-evaluation-harness's checkers of IFEval's 25 rules; `ifbench`, allenai/IFBench's checkers.

    Raises:
        ValueError: the library is unknown, or it or its data are not installed.
    """
    if library not in LIBRARIES:
        raise ValueError(f"unknown library={library!r}: {nearest(library, LIBRARIES)}")
    checkers = _checkers(LIBRARIES[library])
    return Environment(
        name="published_instructions",
        check=partial(check, known=checkers),
        verify=partial(verify, checkers=checkers),
    )


def _checkers(library: Library) -> Mapping[str, Any]:
    try:
        import nltk
        from langdetect import DetectorFactory

        for name in library.data:  # the libraries download them when they are imported
            nltk.data.find(name)
        registry = import_module(library.module)
    except ImportError as error:
        raise ValueError(f"the published checkers are not installed ({error}): run {library.install}") from None
    except LookupError:
        names = " ".join(name.rpartition("/")[2] for name in library.data)
        raise ValueError(
            f"the published checkers require NLTK data: run python -m nltk.downloader {names} "
            "(offline, copy the folders to NLTK_DATA)"
        ) from None
    DetectorFactory.seed = 0  # otherwise the language of a short text is random
    return registry.INSTRUCTION_DICT
