"""Verifier for tool hallucination: if no tool is declared, any tool call is wrong, whatever the answer is.

Nemotron 3 Nano, appendix C: where no tools are given, the model must "rely entirely on internal reasoning; therefore,
any output containing a tool call" is a hallucination, in whatever format. Calls in text are recognized as in the
preference data (`nemo_ext.data.preference.hallucination`).

A reference is {tools, answer}. `tools` are the declared tools, by default none. `answer` says how the answer itself is
checked, as in {environment: math, reference: {answer: "4"}}; by default any answer without undeclared calls is correct.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.chat.tool_calls import Style, call_problem, calls_of, check_tools
from nemo_ext.data.preference.group import Generation
from nemo_ext.data.preference.hallucination import HallucinationRules
from nemo_ext.job.settings import check_keys, checked
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.tool_calls import check_style


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Declared tools, and how the answer is checked.

    Attributes:
        answer: environment that checks the answer, and the reference as parsed by it; None to skip this check.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    answer: tuple[Environment, Any] | None = None


@dataclass(frozen=True)
class _Answer:
    """How the answer is checked, as written in a task."""

    environment: str
    reference: Mapping[str, Any]


class Verifier:
    """Checks that a response calls only declared tools; its settings are the arguments of `environment`."""

    def __init__(
        self, *, environments: Mapping[str, Mapping[str, Any]] | None, search_reasoning: bool, style: Style
    ) -> None:
        check_style(style)
        if not isinstance(search_reasoning, bool):
            raise ValueError(f"search_reasoning must be true or false, not {search_reasoning!r}")
        self._style = style
        self._rules = HallucinationRules(search_reasoning=search_reasoning)
        self._settings = dict(environments or {})
        self._environments = {name: self._single_turn(name, "environments") for name in self._settings}

    def check(self, reference: Mapping[str, Any]) -> Reference:
        """Parse a task's reference: {tools: [...], answer: {environment, reference}}, both optional.

        Raises:
            ValueError: the reference is invalid; the message names the key and the accepted values.
        """
        check_keys(reference, ("tools", "answer"), required=(), where="reference")
        tools = check_tools(reference.get("tools") or (), "reference.tools")
        answer = reference.get("answer")
        if answer is None:
            return Reference(tools=tools)
        check = checked(_Answer, answer, where="reference.answer", strict=True)
        name = check.environment
        if name not in self._environments:
            self._environments[name] = self._single_turn(name, "reference.answer.environment")
        environment = self._environments[name]
        try:
            return Reference(tools=tools, answer=(environment, environment.check(check.reference)))
        except ValueError as error:
            raise ValueError(f"reference.answer.reference is invalid for environment {name}: {error}") from None

    def verify(self, response: Response, reference: Reference) -> Verdict | Awaitable[Verdict]:
        """Return the verdict `wrong` if a call is invalid or its tool undeclared; otherwise check the answer."""
        message = Message(
            role="assistant",
            content=response.answer,
            reasoning=response.thinking,
            tool_calls=response.tool_calls,
        )
        if not reference.tools and self._rules.calls(Generation(messages=(message,))):
            return Verdict.wrong("calls a tool although none is declared")
        if reference.tools:
            parsed = calls_of(response, reference.tools, self._style)
            problems = [*parsed.problems, *(call_problem(call, reference.tools) for call in parsed.calls)]
            if problem := next(filter(None, problems), ""):
                return Verdict.wrong(problem[:300])
        if reference.answer is not None:
            environment, parsed_reference = reference.answer
            assert environment.verify is not None
            return environment.verify(response, parsed_reference)
        if not any(map(str.isalnum, response.answer)) and not (reference.tools and response.tool_calls):
            return Verdict.wrong("no answer")
        return Verdict.correct()

    async def reach(self) -> None:
        """Raise ValueError if a judge that checks answers cannot be reached."""
        for made in self._environments.values():
            if made.reach is not None:
                await made.reach()

    def _single_turn(self, name: Any, where: str) -> Environment:
        try:
            made = make(name, self._settings.get(name))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: environment {name!r} cannot be created: {error}") from None
        if made.verify is None or name == "tool_hallucination":
            raise ValueError(f"{where}: environment {name} cannot check one answer on its own; choose another one")
        return made


def environment(
    *,
    environments: Mapping[str, Mapping[str, Any]] | None = None,
    search_reasoning: bool = True,
    style: Style = "any",
) -> Environment:
    """Create the environment `tool_hallucination`, in which calls to undeclared tools are wrong.

    Args:
        environments: settings of the environments that check answers, such as {math: {time_limit: 10}}.
        search_reasoning: whether calls written only in the reasoning also count, as in the preference data.
        style: format of calls in raw text, for tasks that declare tools.

    Raises:
        ValueError: a setting is invalid.
    """
    verifier = Verifier(environments=environments, search_reasoning=search_reasoning, style=style)
    # Whether the check of the answer waits depends on the reference.
    return Environment(
        name="tool_hallucination", check=verifier.check, verify=verifier.verify, waits=True, reach=verifier.reach
    )
