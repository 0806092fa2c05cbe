"""Chat templates: a conversation as the text that a model reads, with the spans that it is trained to write.

A template is a Jinja file in Hugging Face's dialect, so the file that trains a model also serves it, as
`tokenizer.chat_template`. What the model writes stands between `{% generation %}` and `{% endgeneration %}`, and begins
where the template's own generation prompt ends. Data never become markup: control tokens that they spell are quoted
before the template sees them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import is_
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Node, Output, Scope, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_ext.chat.sample import Message, Sample, has_reasoning, openai_messages
from nemo_ext.job.settings import nearest

FOLDER = Path(__file__).parent / "templates"

Span = tuple[int, int]

# Unicode noncharacters, reserved for a program's own use. One found in the data becomes ESCAPE and a digit.
_OPEN, _CLOSE, _QUOTE, _UNQUOTE, _LAST_TURN, _ESCAPE = _MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"
_ANY_MARK = re.compile(f"([{_MARKS}])")
_ANSWER = "\ue000"  # of the private use area, so no template writes it


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation rendered as text.

    Attributes:
        text: whole text.
        trained: spans that the model writes, as (start, end) in characters, in order.
        quoted: spans where data spell a control token that must stay ordinary text.
        thinking: True if the text is in the mode with reasoning.
    """

    text: str
    trained: tuple[Span, ...]
    quoted: tuple[Span, ...] = ()
    thinking: bool = False

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """Pieces of the text, each with True if it is trained on."""
        pieces = []
        position = 0
        for start, end in self.trained:
            pieces += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        pieces.append((self.text[position:], False))
        return [(text, trained) for text, trained in pieces if text]


class ControlTokens:
    """Control tokens that data must not become; quotes data that spell one.

    Args:
        tokens: names of the tokens; where one begins with another, the longest counts.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
        # Two patterns, because names that all begin with "<" are found many times faster alone.
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._all = re.compile("|".join([*map(re.escape, longest_first), f"[{_MARKS}]"]))

    def quoted(self, value: Any) -> Any:
        """Put marks around every token name in the value's strings; returns the value itself if there is none."""
        if isinstance(value, str):
            # Few texts hold a name and none should hold a mark: two quick checks spare the slow one.
            found = self._names.search(value) or (not value.isascii() and _ANY_MARK.search(value))
            return self._all.sub(_quote, value) if found else value
        if isinstance(value, list | tuple):
            items = [self.quoted(item) for item in value]
            return value if all(map(is_, items, value)) else items
        if isinstance(value, Mapping):
            keys, items = self.quoted(list(value)), self.quoted(list(value.values()))
            same = all(map(is_, keys, value)) and all(map(is_, items, value.values()))
            return value if same else dict(zip(keys, items, strict=True))
        return value


_NO_TOKENS = ControlTokens(())


class Template:
    """A compiled chat template.

    Args:
        name: name of the template in error messages.
        source: Jinja source.
        variables: further variables of the template, such as `bos_token`.
    """

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.source = source
        self.variables = dict(variables or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # each rendering copies them, and a ChainMap slowly
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template {name}, line {error.lineno}: {error.message}") from error
        texts = [node.data for node in parsed.find_all(TemplateData)]
        texts += [node.value for node in parsed.find_all(Const) if isinstance(node.value, str)]
        self.literals = "\0".join(texts)
        self.marks_generation = _OPEN in self.literals

    def __reduce__(self) -> tuple[type["Template"], tuple[str, str, dict[str, Any]]]:
        return Template, (self.name, self.source, self.variables)

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Template":
        """Load a template of nemo_ext by its name, or from a file or the folder of a Hugging Face tokenizer.

        A published checkpoint's own template is in its folder; it needs `{% generation %}` marks to train with.

        Raises:
            ValueError: there is no such template or file, or it is not Jinja.
        """
        given = str(name_or_path)
        if given in names():
            return cls(given, (FOLDER / f"{given}.jinja").read_text())
        path = Path(given).expanduser()
        if path.is_dir():
            return _of_folder(path)
        if path.is_file():
            return cls(given, path.read_text())
        raise ValueError(f"no chat template {given!r}, and no file or folder of this name: {nearest(given, names())}")

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "Template":
        """The chat template of a Hugging Face tokenizer.

        Raises:
            ValueError: the tokenizer has none.
        """
        source = getattr(tokenizer, "chat_template", None)
        if not isinstance(source, str):
            raise ValueError("the tokenizer has no chat template: name one in template=")
        special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return cls("of the tokenizer", source, special)

    def render(
        self,
        sample: Sample,
        *,
        thinking: bool | None = None,
        train: Literal["all", "last_turn"] = "all",
        control: ControlTokens | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Render the conversation as text.

        Args:
            sample: conversation; its `thinking` sets the mode of the text, None that of its last turn (`thinks`).
            thinking: mode that overrides the sample's.
            train: spans to train on: all that the template marks, or only those after the last user message.
            control: tokens that data must not become; spans where data spell one are listed in `quoted`.
            add_generation_prompt: True to end with the prompt of the next answer, in the mode asked for.

        Raises:
            ValueError: the template refuses the sample, or the mode is off and its last turn has reasoning.
        """
        mode = thinking if thinking is not None else thinks(sample)
        if not mode and not add_generation_prompt and has_reasoning(last_turn(sample.messages)):
            raise ValueError(f"sample {sample.id}: thinking is off, but its last turn has reasoning: strip it first")
        given = [openai_messages(sample.messages), list(sample.tools) or None]
        messages, tools = ((control or _NO_TOKENS).quoted(value) for value in given)
        if train == "last_turn":
            user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
            if user is not None:
                messages[user]["content"] = _LAST_TURN + messages[user]["content"]
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                enable_thinking=mode,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (ArithmeticError, RecursionError, ValueError) as error:
            # The sandbox refuses ranges above jinja2.sandbox.MAX_RANGE before it makes them.
            raise ValueError(f"sample {sample.id}: chat template {self.name}: {error}: mend the template") from error
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(f"sample {sample.id}: chat template {self.name}: {error}") from error
        return _read(text, thinking=mode)

    def renderings(
        self,
        sample: Sample,
        *,
        turns: Literal["split", "last", "whole"] = "split",
        control: ControlTokens | None = None,
    ) -> list[Rendered]:
        """Texts to train on: every answer after the prompt that the model will see when it writes it.

        Args:
            turns: treatment of earlier turns whose reasoning the template drops, since "for a given generation, only
                reasoning content from the current turn is materialized into the prompt" (Nemotron 3 Nano, figure 4).
                split: one text per turn, up to that turn and trained on it alone; every answer is trained on once, and
                the prompts repeat. last: the last turn alone. whole: one text, trained on where the template marks it.
            control: see `render`.

        A template without marks renders the prompt of each answer instead: the text after it is trained on, in the last
        turn alone if the template drops reasoning.

        Raises:
            ValueError: see `render`; a template without marks leaves reasoning out, or begins an answer otherwise than
                its prompt ends.
        """
        if turns == "split" and self.drops_reasoning:
            pieces = split_turns(sample)
            if len(pieces) > 1:
                return [self._to_train_on(piece, "last_turn", control) for piece in pieces]
        return [self._to_train_on(sample, "last_turn" if turns == "last" else "all", control)]

    def _to_train_on(
        self, sample: Sample, train: Literal["all", "last_turn"], control: ControlTokens | None
    ) -> Rendered:
        rendered = self.render(sample, train=train, control=control)
        if self.marks_generation:
            return rendered
        turn = last_turn(sample.messages)
        first = len(sample.messages) - len(turn) if train == "last_turn" or self.drops_reasoning else 0
        places = [n for n, message in enumerate(sample.messages) if message.role == "assistant" and n >= first]
        return replace(
            rendered, trained=tuple(self._after_its_prompt(sample, place, rendered.text) for place in places)
        )

    def _after_its_prompt(self, sample: Sample, place: int, text: str) -> Span:
        """Span of a message in the text, from the end of its prompt."""
        message = sample.messages[place]
        if (message.reasoning or "") not in text:
            raise ValueError(f"sample {sample.id}: chat template {self.name} leaves out reasoning_content: use another")
        before, with_it = (replace(sample, messages=sample.messages[:end]) for end in (place, place + 1))
        for mode in (thinks(sample), message.reasoning is not None):
            prompt = self.render(before, thinking=mode, add_generation_prompt=True).text
            # The line break after an answer belongs to what follows it.
            answered = self.render(with_it, thinking=thinks(sample)).text.rstrip()
            if text.startswith(prompt) and text.startswith(answered):
                return len(prompt), len(answered)
        raise ValueError(
            f"sample {sample.id}: chat template {self.name} begins message {place} otherwise than its prompt ends: "
            "mark what is generated in it, with {% generation %} and {% endgeneration %}"
        )

    @cached_property
    def has_modes(self) -> bool:
        """True if a prompt in the mode with reasoning differs from one without."""
        asked = Sample(id="has_modes", messages=(Message(role="user", content="a"),))
        on, off = (self.render(asked, thinking=mode, add_generation_prompt=True).text for mode in (True, False))
        return on != off

    @cached_property
    def closing(self) -> str:
        """Text with which an answer's turn ends; "" where the template refuses a plain question with its answer."""
        asked = (Message(role="user", content="a"), Message(role="assistant", content=_ANSWER))
        try:
            return self.render(Sample(id="closing", messages=asked)).text.rpartition(_ANSWER)[2]
        except ValueError:
            return ""

    @cached_property
    def drops_reasoning(self) -> bool:
        """True if the reasoning of earlier turns is left out of the prompt."""
        said = [Message(role="user", content="a"), Message(role="assistant", content="b", reasoning="earlier trace")]
        said += [Message(role="user", content="c"), Message(role="assistant", content="d", reasoning="trace")]
        return "earlier trace" not in self.render(Sample(id="drops_reasoning", messages=tuple(said))).text


def names() -> list[str]:
    """Names of the templates that come with nemo_ext."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def end_tokens(tokenizer: Any, template: Template | None = None, generation: Any = None) -> frozenset[int]:
    """Ids that end an answer: those of the generation config, the tokenizer's, and that of the template's end of turn.

    Args:
        tokenizer: Hugging Face tokenizer.
        template: chat template; None takes the tokenizer's, if it has one.
        generation: transformers' GenerationConfig; None for none.
    """
    listed = getattr(generation, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])} - {None}
    if template is None and isinstance(getattr(tokenizer, "chat_template", None), str):
        template = Template.of_tokenizer(tokenizer)
    closing = template.closing.lstrip() if template is not None else ""
    # A turn that ends with plain text has no such token: its first one may be anywhere in an answer.
    ends |= {*tokenizer.encode(closing, add_special_tokens=False)[:1]} & tokenizer.added_tokens_decoder.keys()
    return frozenset(ends)


def thinks(sample: Sample) -> bool:
    """Mode of a sample: its `thinking`, or where that is None, True if its last turn has reasoning."""
    return has_reasoning(last_turn(sample.messages)) if sample.thinking is None else sample.thinking


def last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages after the last user message; all of them if there is none."""
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    return messages[users[-1] + 1 :] if users else messages


def split_turns(sample: Sample) -> list[Sample]:
    """Split a sample into one per turn with an answer, ending there and in that turn's mode; ids get `#1`, `#2` ...

    A sample without any reasoning is left whole, since no turn's prompt differs from what the whole shows.
    """
    if not has_reasoning(sample.messages):
        return [sample]
    starts = [number for number, message in enumerate(sample.messages) if message.role == "user"]
    ends = [*starts[1:], len(sample.messages)]
    pieces: list[Sample] = []
    for start, end in zip(starts, ends, strict=True):
        turn = sample.messages[start:end]
        if any(message.role == "assistant" for message in turn):
            name = f"{sample.id}#{len(pieces) + 1}"
            pieces.append(
                replace(sample, id=name, messages=sample.messages[:end], thinking=has_reasoning(turn)),
            )
    return pieces if len(pieces) > 1 else [sample]


def _quote(match: re.Match[str]) -> str:
    found = match[0]
    if found in _MARKS:
        return f"{_ESCAPE}{_MARKS.index(found)}"
    return f"{_QUOTE}{found}{_UNQUOTE}"


def _read(text: str, *, thinking: bool) -> Rendered:
    """Turn the marks in a template's output into spans."""
    pieces = _ANY_MARK.split(text)
    plain: list[str] = []
    spans: dict[str, list[Span]] = {_CLOSE: [], _UNQUOTE: []}
    position = begun = quoted = turn = 0
    for number in range(0, len(pieces), 2):
        mark, piece = pieces[number - 1] if number else "", pieces[number]
        if mark == _ESCAPE:
            piece = _MARKS[int(piece[0])] + piece[1:]
        elif mark == _OPEN:
            begun = position
        elif mark == _QUOTE:
            quoted = position
        elif mark == _LAST_TURN:
            turn = position
        elif mark:
            start = begun if mark == _CLOSE else quoted
            if position > start:
                spans[mark].append((start, position))
        plain.append(piece)
        position += len(piece)
    trained = tuple(span for span in spans[_CLOSE] if span[0] >= turn)
    return Rendered("".join(plain), trained, tuple(spans[_UNQUOTE]), thinking)


class _Generation(Extension):
    """Jinja tag `{% generation %}`: puts marks around what the model writes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = [Output([TemplateData(_OPEN)]), *body, Output([TemplateData(_CLOSE)])]
        return [Scope(marked, lineno=line)]


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja environment of Hugging Face templates, with the names of transformers' utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter, whose options templates also give by their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _of_folder(folder: Path) -> Template:
    """Load the template from a Hugging Face tokenizer's folder."""
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{config_file}: cannot be read ({error}): mend or remove it") from error
    source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: no chat_template.jinja and no chat_template in a tokenizer_config.json")
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    words = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return Template(str(folder), source, {name: word for name, word in words.items() if isinstance(word, str)})
