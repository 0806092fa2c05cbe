"""Multi-turn conversations of the Berkeley Function-Calling Leaderboard (BFCL v3), with its own simulated programs.

The programs come from the package `bfcl-eval` (Apache-2.0), version 2026.3.23 or compatible; they only change their own
state. As in its `multi_turn_checker`, after each user turn the state must equal the state after the expected calls, and
the results so far must include the results of those calls. Only methods that the leaderboard documents can be called,
and no code is evaluated.
"""

import ast
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import localcontext
from functools import lru_cache, partial
from importlib import import_module, resources
from typing import Any

from pydantic import Field

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.job.settings import checked, nearest
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

MOST_STEPS = 20
"""Maximum number of responses with calls in a user turn; more end the conversation."""
_MOST_TURNS = 100 * MOST_STEPS
_MOST = 1000
"""Maximum of exponents and of decimal places, which could otherwise keep the programs busy for hours."""
_CALLING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A conversation's user turns, initial state and expected calls, in the leaderboard's columns.

    Attributes:
        question: messages of each user turn; a turn without any adds the held-back functions.
        involved_classes: names of the simulated programs.
        ground_truth: expected calls of each user turn, as Python expressions with literal arguments.
        initial_config: mapping from program to its initial state.
        missed_function: mapping from user turn, as a string from "0", to functions that are held back until then.
        long_context: whether the programs add long texts to their states and results.
    """

    question: tuple[tuple[Mapping[str, Any], ...], ...]
    involved_classes: tuple[str, ...] = Field(min_length=1)
    ground_truth: tuple[tuple[str, ...], ...]
    initial_config: Mapping[str, Any] = field(default_factory=dict)
    missed_function: Mapping[str, Sequence[str]] = field(default_factory=dict)
    long_context: bool = False

    def __post_init__(self) -> None:
        if len(self.question) != len(self.ground_truth):
            turns = f"{len(self.question)} turns of `question`"
            raise ValueError(
                f"ground_truth must have one list for each of the {turns}, not {len(self.ground_truth)} lists"
            )
        for name in self.involved_classes:
            _documents(name)
        for calls in self.ground_truth:
            for call in calls:
                _parsed(call)


check = partial(checked, Reference, where="reference", strict=True)
"""Parses a task's reference; raises ValueError if it is invalid or `bfcl-eval` is not installed."""


def tools(involved_classes: Sequence[str], missed_function: Mapping[str, Sequence[str]] | None = None) -> list[Any]:
    """Return the leaderboard's descriptions of the programs' functions, without the held-back functions."""
    missed = {name for names in (missed_function or {}).values() for name in names}
    functions = [function for name in involved_classes for function in _documents(name)]
    return [function for function in functions if function["name"] not in missed]


@lru_cache(maxsize=32)
def _documents(program: str) -> list[Any]:
    config = _package("constants.executable_backend_config")
    files = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING
    if program not in files or program in config.OMIT_STATE_INFO_CLASSES:  # these search the web or keep files
        raise ValueError(f"involved_classes: unknown program {program!r}: {nearest(program, files)}")
    file = resources.files("bfcl_eval") / "data" / "multi_turn_func_doc" / files[program]
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def _package(module: str) -> Any:
    try:
        return import_module(f"bfcl_eval.{module}")
    except ImportError as error:
        raise ValueError(
            f"the leaderboard's programs are not installed ({error}): run pip install --no-deps bfcl-eval"
        ) from None


def _parsed(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split an expected call into its name and its positional and named arguments."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise ValueError("expected NAME(ARGUMENTS)")
        named = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
        return tree.func.id, [ast.literal_eval(each) for each in tree.args], named
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"ground_truth: {call[:200]!r} is not a call with literal arguments ({error})") from None


class Programs:
    """The simulated programs of a conversation, with their states."""

    def __init__(self, reference: Reference) -> None:
        config = _package("constants.executable_backend_config")
        self.instances: dict[str, Any] = {}
        for name in reference.involved_classes:
            instance = getattr(import_module(config.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in config.STATELESS_CLASSES:
                state = deepcopy(dict(reference.initial_config.get(name, {})))
                instance._load_scenario(state, long_context=reference.long_context)
            self.instances[name] = instance

    def call(self, name: str, /, *arguments: Any, **named: Any) -> str:
        """Call a documented function and return its result as text, or the error as the leaderboard words it."""
        if any(_exceeds(named.get(key), _MOST) for key in ("exponent", "precision", "decimal_places")):
            return f"Error during execution: numbers over {_MOST} are not allowed here"
        for program, instance in self.instances.items():
            if any(function["name"] == name for function in _documents(program)):
                with _restored_precision():
                    try:
                        result = getattr(instance, name)(*arguments, **named)
                        return result if isinstance(result, str) else _text(result)
                    except Exception as error:
                        return f"Error during execution: {error}"
        return f"Error during execution: name {name!r} is not defined"

    def state(self) -> dict[str, dict[str, Any]]:
        """Return each program's public attributes, by program."""
        return {
            name: {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            for name, instance in self.instances.items()
        }


@contextmanager
def _restored_precision() -> Iterator[None]:
    """Context manager for one call at a time, after which the precision of mpmath and decimal is restored."""
    mpmath = sys.modules.get("mpmath")
    with _CALLING, localcontext(), nullcontext() if mpmath is None else mpmath.workprec(mpmath.mp.prec):
        yield


def _exceeds(value: Any, most: int) -> bool:
    """Return whether a number, or a string that mpmath reads as one, is NaN or more than `most` in absolute value."""
    try:
        return not abs(float(value)) <= most
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


def _text(result: Any) -> str:
    try:
        return json.dumps(result) if isinstance(result, dict) else str(result)
    except (TypeError, ValueError):
        return str(result)


class Session:
    """Conversation with the simulated programs; implements `nemo_ext.rl.environments.Conversation`."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.programs, self.expected = Programs(reference), Programs(reference)
        self.turn = self.steps = 0
        self.results: list[str] = []
        self.failure = ""

    def step(self, response: Response) -> Sequence[Message]:
        """Carry out the response's calls and return their results, or the next user turn; empty at the end."""
        if self.over:
            return ()
        if not response.tool_calls:
            self._end_turn()
            return () if self.over else self._user()
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.failure = f"turn {self.turn}: more than {MOST_STEPS} responses with calls"
            return ()
        return tuple(self._carried_out(call) for call in response.tool_calls)

    @property
    def over(self) -> bool:
        """True once the conversation has ended."""
        return bool(self.failure) or self.turn >= len(self.reference.question)

    def _carried_out(self, call: ToolCall) -> Message:
        self.results.append(self.programs.call(call.name, **call.arguments))
        return Message(role="tool", content=self.results[-1], tool_call_id=call.id)

    def _end_turn(self) -> None:
        calls = [_parsed(call) for call in self.reference.ground_truth[self.turn]]
        results = [self.expected.call(name, *arguments, **named) for name, arguments, named in calls]
        if calls and not self.steps:
            self.failure = f"turn {self.turn}: no calls"
        elif calls and (differing := self._differing()):
            self.failure = f"turn {self.turn}: unexpected state of {', '.join(differing)}"
        elif missing := Counter(results) - Counter(self.results):
            self.failure = f"turn {self.turn}: missing result {next(iter(missing))[:100]}"
        self.turn, self.steps = self.turn + 1, 0

    def _differing(self) -> list[str]:
        actual, expected = self.programs.state(), self.expected.state()
        return [name for name in expected if actual[name] != expected[name]]

    def _user(self) -> tuple[Message, ...]:
        said = [Message(role=each["role"], content=str(each["content"])) for each in self.reference.question[self.turn]]
        if names := self.reference.missed_function.get(str(self.turn)):
            functions = [function for function in tools(self.reference.involved_classes) if function["name"] in names]
            text = f"{json.dumps(functions)}\nThese functions are available from now on. Try again with them."
            said.append(Message(role="user", content=text))
        return tuple(said)

    def verdict(self) -> Verdict:
        """Return a verdict, `correct` if every turn ended in the expected state with the expected results."""
        if self.failure:
            return Verdict.wrong(self.failure)
        if self.turn < len(self.reference.question):
            return Verdict.wrong(f"turn {self.turn}: the conversation ended early")
        return Verdict.correct()


def environment() -> Environment:
    """Create the environment `bfcl_multi_turn`, for the leaderboard's multi-turn conversations."""
    return Environment(name="bfcl_multi_turn", check=check, begin=Session, max_turns=_MOST_TURNS)
