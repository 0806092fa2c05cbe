"""Tool hallucination: pairs from many solutions of one task (Nemotron 3 Nano, appendix C).

no_tools                no tools are declared; a right answer over a wrong one
with_tools              tools are declared; a right answer over a wrong one, called or not
hallucination_penalty   no tools are declared; a right answer without a call over any answer with one

The paper states what decides each group and the number of pairs in all (2000 tasks, 32 solutions, about 50 000 pairs).
It does not state these (choice): pairs of no_tools hold no calls, so that correctness alone decides; the chosen side of
hallucination_penalty is right; the number of pairs per task and group is limited.
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

# Parts of JSON, written so that a search takes linear time: objects hold objects, which hold none.
_VALUE = r"\s*:\s*(?:\"(?:[^\"\\]|\\.)*\"|[\w.+-]+)\s*,\s*"
# Arguments by name, or such an object in a text; not lists, and no schema, which describes a function.
_NAMED = r"(?=\s*:\s*[{\"])(?!\s*:\s*\{\s*\"(?:type\"\s*:\s*\"object\"|properties\"\s*:\s*\{|\$schema\"))"


def _of_json(names: str, arguments: str, *, of: str = "") -> tuple[str, str]:
    """Patterns of an object with one of these keys and then one of those, with `of` behind it, or the reverse."""
    others = rf"(?:\"(?!(?:{names}|{arguments})\")\w+\"{_VALUE})*"
    name, given = rf"\"(?:{names})\"", rf"\"(?:{arguments})\"{of}"
    return (
        rf"\{{\s*{others}{name}{_VALUE}{others}{given}\s*:",
        rf"{given}(?:\s*:\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}\s*,\s*|{_VALUE}){others}{name}\s*:",
    )


# Markup of calls by model or runtime; "any tool-specific API format" is the paper's wording.
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
    r"\bfunctions\.[\w.\-]{1,100}\(\s*\{\s*[\"}]",  # OpenAI's namespace; a quoted key is JSON's, others are code's
    r"\bto=(?:functions\.|browser\.|python\b)[\w.\-]{0,100}"
    r"(?:\s|json|code|<\|(?!message)\w+\|>){0,8}(?:\{|<\|message)",  # gpt-oss
    r"\"type\"\s*:\s*\"tool_use\"",  # Anthropic's JSON
    *_of_json("name|recipient_name", "arguments|parameters", of=_NAMED),
    *_of_json("function", "arguments", of=_NAMED),
    *_of_json("tool|tool_name", "arguments|parameters|args|input|tool_input"),
    *_of_json("action", "action_input"),  # LangChain
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HallucinationRules:
    """Settings of the three groups.

    Attributes:
        per_prompt: largest number of pairs of each group for one task; a group left out has none.
        call_patterns: regular expressions of text that counts as a call; proper tool calls always do.
        search_reasoning: True to search the reasoning, too.
        chosen_correct: True if the chosen side of the penalty group must be right, not only free of calls.
    """

    per_prompt: dict[str, NonNegativeInt] = field(default_factory=lambda: dict.fromkeys(GROUPS, 9))
    call_patterns: Strings = CALL_PATTERNS
    search_reasoning: bool = True
    chosen_correct: bool = True

    def __post_init__(self) -> None:
        for name in self.per_prompt:
            if name not in GROUPS:
                raise ValueError(f"per_prompt: unknown group {name!r}: {nearest(name, GROUPS)}")
        for pattern in self.call_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"call_patterns: {pattern!r} is no regular expression ({error})") from None

    @cached_property
    def _calls(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.call_patterns) or "(?!)")

    def calls(self, made: Generation) -> bool:
        """True if an answer calls a tool, or tries to."""
        for message in made.messages:
            if message.tool_calls or message.role == "tool" or self._calls.search(message.content):
                return True
            if self.search_reasoning and message.reasoning and self._calls.search(message.reasoning):
                return True
        return False


def tool_hallucination(group: Group, rules: HallucinationRules, seed: int, report: ReadReport) -> list[Pair]:
    """Make the pairs of one task, with or without tools as its prompt declares."""
    unknown = sum(made.correct is None for made in group.generations)
    if unknown:
        report.skip("answers not marked correct or not", group.id, count=unknown)

    def pairs(kind: str, good: list[Generation], bad: list[Generation]) -> list[Pair]:
        limit = rules.per_prompt.get(kind, 0)
        if limit and (not good or not bad):
            report.skip(f"{kind}: no {'chosen' if not good else 'rejected'} answer", group.id)
        return balanced(group, good, bad, limit=limit, kind=kind, seed=seed)

    if group.tools:
        right = [made for made in group.generations if made.correct]
        return pairs(WITH_TOOLS, right, [made for made in group.generations if made.correct is False])
    calling, free = list[Generation](), list[Generation]()
    for made in group.generations:
        (calling if rules.calls(made) else free).append(made)
    right = [made for made in free if made.correct]
    wrong = [made for made in free if made.correct is False]
    return pairs(NO_TOOLS, right, wrong) + pairs(PENALTY, right if rules.chosen_correct else free, calling)
