"""Tool hallucination: pairs from many solutions to one task (Nemotron 3 Nano, appendix C).

no_tools                no tools are declared; a correct answer over an incorrect one
with_tools              tools are declared; a correct answer over an incorrect one, with or without calls
hallucination_penalty   no tools are declared; a correct answer without a call over any answer with one

The paper states the criterion of each group and the total number of pairs (2000 tasks, 32 solutions, about 50 000
pairs). It does not state these (choice): pairs of no_tools contain no calls, so that correctness alone decides; the
chosen answer of hallucination_penalty is correct; the number of pairs per task and group is limited.
"""

import re
from dataclasses import field
from functools import cached_property

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.preference.group import Generation, Group, Pair
from nemo_ext.data.preference.pairs import balanced
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.settings import STRICT, Strings, nearest

NO_TOOLS, WITH_TOOLS, PENALTY = GROUPS = ("no_tools", "with_tools", "hallucination_penalty")

# Parts of JSON, written so that a search takes linear time: objects are nested at most two deep.
_VALUE = r"\s*:\s*(?:\"(?:[^\"\\]|\\.)*\"|[\w.+-]+)\s*,\s*"
# An object of arguments, or text that contains one; not a list, and not a JSON schema, which declares a function.
_NAMED = r"(?=\s*:\s*[{\"])(?!\s*:\s*\{\s*\"(?:type\"\s*:\s*\"object\"|properties\"\s*:\s*\{|\$schema\"))"


def _json_calls(names: str, arguments: str, *, value: str = "") -> tuple[str, str]:
    """Return patterns of a JSON object with one of the keys `names` and one of `arguments`, in either order.

    `value` is a pattern that must follow the key of the arguments.
    """
    others = rf"(?:\"(?!(?:{names}|{arguments})\")\w+\"{_VALUE})*"
    name, called_with = rf"\"(?:{names})\"", rf"\"(?:{arguments})\"{value}"
    return (
        rf"\{{\s*{others}{name}{_VALUE}{others}{called_with}\s*:",
        rf"{called_with}(?:\s*:\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}\s*,\s*|{_VALUE}){others}{name}\s*:",
    )


# Markup of calls, by model or runtime; the paper says "any tool-specific API format".
CALL_PATTERNS = (
    r"<tool_call>",  # Qwen, Nemotron 3, Domyn
    r"<TOOLCALL>",  # Llama-Nemotron
    r"<function_calls?>",  # OLMo 3
    r"<function=[\w.\-]+>",  # Llama, Qwen-Coder
    r"<invoke name=",  # Anthropic's XML, MiniMax
    r"<\|python_tag\|>",  # Llama 3.1
    r"\[TOOL_CALLS\]",  # Mistral
    r"<｜tool▁calls?▁begin｜>",  # DeepSeek
    r"<\|tool_call",  # Kimi, Phi
    r"(?:```|<)tool_(?:code|call)",  # Gemma
    r"\bAction:[^\n]{0,200}\n\s{0,20}Action Input:",  # ReAct
    r"\bfunctions\.[\w.\-]{1,100}\(\s*\{\s*[\"}]",  # OpenAI's namespace; unquoted keys would be code, not JSON
    r"\bto=(?:functions\.|browser\.|python\b)[\w.\-]{0,100}"
    r"(?:\s|json|code|<\|(?!message)\w+\|>){0,8}(?:\{|<\|message)",  # gpt-oss
    r"\"type\"\s*:\s*\"tool_use\"",  # Anthropic's JSON
    *_json_calls("name|recipient_name", "arguments|parameters", value=_NAMED),
    *_json_calls("function", "arguments", value=_NAMED),
    *_json_calls("tool|tool_name", "arguments|parameters|args|input|tool_input"),
    *_json_calls("action", "action_input"),  # LangChain
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HallucinationRules:
    """Settings of the three groups.

    Attributes:
        per_prompt: mapping from group to maximum number of pairs per task; 0 for groups that are not listed.
        call_patterns: regular expressions for text that counts as a call, in addition to structured tool calls.
        search_reasoning: True to search the reasoning as well.
        chosen_correct: True if chosen answers of hallucination_penalty must also be correct, not only free of calls.
    """

    per_prompt: dict[str, NonNegativeInt] = field(default_factory=lambda: dict.fromkeys(GROUPS, 9))
    call_patterns: Strings = CALL_PATTERNS
    search_reasoning: bool = True
    chosen_correct: bool = True

    def __post_init__(self) -> None:
        for name in self.per_prompt:
            if name not in GROUPS:
                raise ValueError(f"per_prompt.{name}: unknown group of pairs; {nearest(name, GROUPS)}")
        for pattern in self.call_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"call_patterns: {pattern!r} is not a valid regular expression ({error}): correct it"
                ) from None

    @cached_property
    def _calls(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.call_patterns) or "(?!)")

    def calls(self, answer: Generation) -> bool:
        """Return whether an answer calls a tool or contains text that looks like a call."""
        for message in answer.messages:
            if message.tool_calls or message.role == "tool" or self._calls.search(message.content):
                return True
            if self.search_reasoning and message.reasoning and self._calls.search(message.reasoning):
                return True
        return False


def tool_hallucination(group: Group, rules: HallucinationRules, seed: int, report: ReadReport) -> list[Pair]:
    """Return a task's pairs: with_tools if the prompt declares tools, otherwise no_tools and hallucination_penalty."""
    unknown = sum(answer.correct is None for answer in group.generations)
    if unknown:
        report.skip("answers without a mark of correctness", group.id, count=unknown)

    def pairs(kind: str, good: list[Generation], bad: list[Generation]) -> list[Pair]:
        limit = rules.per_prompt.get(kind, 0)
        if limit and (not good or not bad):
            report.skip(f"{kind}: no {'chosen' if not good else 'rejected'} answer", group.id)
        return balanced(group, good, bad, limit=limit, kind=kind, seed=seed)

    if group.tools:
        correct = [answer for answer in group.generations if answer.correct]
        return pairs(WITH_TOOLS, correct, [answer for answer in group.generations if answer.correct is False])
    calling, free = list[Generation](), list[Generation]()
    for answer in group.generations:
        (calling if rules.calls(answer) else free).append(answer)
    correct = [answer for answer in free if answer.correct]
    incorrect = [answer for answer in free if answer.correct is False]
    return pairs(NO_TOOLS, correct, incorrect) + pairs(PENALTY, correct if rules.chosen_correct else free, calling)
