"""Chat templates: a conversation as the text that a model reads, with the spans that it is trained to write.

A template is a Jinja file in Hugging Face's dialect, so the file that trains a model also serves it, as
`tokenizer.chat_template`. What the model writes stands between `{% generation %}` and `{% endgeneration %}`, and begins
where the template's own generation prompt ends. Data never become markup: control tokens that they spell are quoted
before the template sees them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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

from nemo_ext.chat.sample import Message, Sample, ToolCall, has_reasoning, openai_messages
from nemo_ext.job.settings import nearest

FOLDER = Path(__file__).parent / "templates"
TOKENIZER_CONFIG = "tokenizer_config.json"

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
        variables: further variables of the template, such as `bos_token`; None where the tokenizer is not known, so
            that a template that writes `bos_token` or `eos_token` fails.
    """

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.source = source
        self.variables = dict(variables or {})
        self._unknown = _UNKNOWN if variables is None else {}
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

    def __reduce__(self) -> tuple[type["Template"], tuple[str, str, dict[str, Any] | None]]:
        return Template, (self.name, self.source, None if self._unknown else self.variables)

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
            beside = path.parent / TOKENIZER_CONFIG
            return cls(given, path.read_text(), _tokens(_config(beside)) if beside.is_file() else None)
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
        as_text = any(message.tool_calls for message in sample.messages) and self.takes_argument_text
        given = [openai_messages(sample.messages, arguments_as_text=as_text, names=True), list(sample.tools) or None]
        messages, tools = ((control or _NO_TOKENS).quoted(value) for value in given)
        if train == "last_turn":
            user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
            if user is not None:
                messages[user]["content"] = _LAST_TURN + messages[user]["content"]
        try:
            text = self._written(messages, tools, enable_thinking=mode, add_generation_prompt=add_generation_prompt)
        except (ArithmeticError, RecursionError, ValueError) as error:
            # The sandbox refuses ranges above jinja2.sandbox.MAX_RANGE before it makes them.
            raise ValueError(f"sample {sample.id}: chat template {self.name}: {error}: mend the template") from error
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(f"sample {sample.id}: chat template {self.name}: {error}") from error
        return _read(text, thinking=mode)

    def _written(self, messages: Any, tools: Any, **more: Any) -> str:
        return self._template.render(messages=messages, tools=tools, **more, **self._unknown, **self.variables)

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

        A template without marks renders the prompt of each answer instead, and the text after it is trained on: in one
        text if every answer in it follows its prompt, else (but for `whole`) in one text per answer. If it drops
        reasoning, one text of a sample with reasoning is trained on in the last turn alone.

        Raises:
            ValueError: see `render` and `check_complete`; a template without marks begins an answer otherwise than its
                prompt ends.
        """
        pieces = split_turns(sample) if turns == "split" and self.drops_reasoning else [sample]
        last = turns == "last" or len(pieces) > 1
        return [text for piece in pieces for text in self._to_train_on(piece, last, turns != "whole", control)]

    def _to_train_on(self, sample: Sample, last: bool, divide: bool, control: ControlTokens | None) -> list[Rendered]:
        rendered = self.render(sample, train="last_turn" if last else "all", control=control)
        self.check_complete(sample, thinking=rendered.thinking)
        if self.marks_generation:
            return [rendered]
        reasons = has_reasoning(sample.messages)
        last = last or (self.drops_reasoning and reasons)
        first = len(sample.messages) - len(last_turn(sample.messages)) if last else 0
        places = [n for n, message in enumerate(sample.messages) if message.role == "assistant" and n >= first]
        spans = [self._after_its_prompt(sample, place, rendered.text) for place in places]
        if None not in spans:
            return [replace(rendered, trained=tuple(span for span in spans if span))]
        texts = []
        for place in places if divide else ():
            until = replace(
                sample, messages=sample.messages[: place + 1], thinking=None if reasons else sample.thinking
            )
            rendered = self.render(until, control=control)
            if span := self._after_its_prompt(until, place, rendered.text):
                texts.append(replace(rendered, trained=(span,)))
        if len(texts) < len(places):
            raise ValueError(
                f"sample {sample.id}: chat template {self.name} begins message {places[spans.index(None)]} otherwise "
                "than its prompt ends: mark what is generated in it, with {% generation %} and {% endgeneration %}"
                + ("" if divide else ", or train on one text per answer, with turns=split")
            )
        return texts

    def _after_its_prompt(self, sample: Sample, place: int, text: str) -> Span | None:
        """Span of a message in the text, from the end of its prompt; None if the text begins otherwise."""
        message = sample.messages[place]
        before, with_it = (replace(sample, messages=sample.messages[:end]) for end in (place, place + 1))
        reasons = has_reasoning(last_turn(with_it.messages))
        # The line break after an answer belongs to what follows it.
        answered = self.render(with_it, thinking=reasons or thinks(sample)).text.rstrip()
        for mode in dict.fromkeys((thinks(sample), message.reasoning is not None)):
            prompt = self.render(before, thinking=mode, add_generation_prompt=True).text
            if text.startswith(prompt) and text.startswith(answered):
                return len(prompt), len(answered)
        return None

    def check_complete(self, sample: Sample, *, thinking: bool) -> None:
        """Check that the text has all that a sample says, but the user's: no template leaves that out.

        Instead of the sample's texts, it looks for words that occur once: a short text may stand anywhere.

        Raises:
            ValueError: the template leaves something out; the reasoning of earlier turns may be.
        """
        probe, words = _probe(sample, all_reasoning=not self.drops_reasoning)
        try:
            text = self.render(probe, thinking=thinking).text
        except ValueError:  # it takes texts apart, and these say nothing to it
            return
        if missing := [name for word, name in words.items() if word not in text]:
            raise ValueError(f"sample {sample.id}: chat template {self.name} leaves out {missing[0]}: use another")

    @cached_property
    def takes_argument_text(self) -> bool:
        """True if calls need their arguments as JSON text: of an object it makes an error, or Python's notation."""
        call = ToolCall(name="f", arguments={"key": "value"}, id="abcdefghi")
        said = (Message(role="user", content="a"), Message(role="assistant", tool_calls=(call,)))
        texts = {}
        for as_text in (False, True):
            messages = openai_messages(said, arguments_as_text=as_text)
            with suppress(jinja2.TemplateError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
                texts[as_text] = self._written(messages, None, enable_thinking=False, add_generation_prompt=False)
        object_fails = False not in texts or "{'key': 'value'}" in texts[False]
        return object_fails and '{"key": "value"}' in texts.get(True, "")

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
            _, answer, closing = self.render(Sample(id="closing", messages=asked)).text.rpartition(_ANSWER)
        except ValueError:
            return ""
        return closing if answer else ""  # a template of parts of content writes no text

    @cached_property
    def drops_reasoning(self) -> bool:
        """True if the reasoning of earlier turns is left out of the prompt, and that of the last turn is not."""
        said = [Message(role="user", content="a"), Message(role="assistant", content="b", reasoning="earlier trace")]
        said += [Message(role="user", content="c"), Message(role="assistant", content="d", reasoning="last trace")]
        try:
            text = self.render(Sample(id="drops_reasoning", messages=tuple(said))).text
        except ValueError:  # it takes no second turn, say: it refuses a sample with one by the sample's name
            return False
        return "last trace" in text and "earlier trace" not in text


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

    A sample without any reasoning is left whole unless it is in the mode for it, since no turn's prompt differs from
    what the whole shows.
    """
    reasons = has_reasoning(sample.messages)
    if not reasons and not sample.thinking:
        return [sample]
    starts = [number for number, message in enumerate(sample.messages) if message.role == "user"]
    ends = [*starts[1:], len(sample.messages)]
    pieces: list[Sample] = []
    for start, end in zip(starts, ends, strict=True):
        turn = sample.messages[start:end]
        if any(message.role == "assistant" for message in turn):
            name = f"{sample.id}#{len(pieces) + 1}"
            pieces.append(
                replace(sample, id=name, messages=sample.messages[:end], thinking=not reasons or has_reasoning(turn)),
            )
    return pieces if len(pieces) > 1 else [sample]


def _probe(sample: Sample, *, all_reasoning: bool) -> tuple[Sample, dict[str, str]]:
    """The sample with a word in place of each text, and what each word stands for if the template has to write it."""
    words: dict[str, str] = {}

    def word(text: str, stands_for: str | None) -> str:
        if not text.strip():
            return text
        made = f"probe{len(words)}x"
        words[made] = stands_for or ""
        return made

    messages = []
    last = len(sample.messages) - len(last_turn(sample.messages))
    names = {"system": "the system message", "assistant": "the text of message {}", "tool": "the tool's answer {}"}
    for place, message in enumerate(sample.messages):
        calls = []
        for call in message.tool_calls:
            made = [word("x", f"the tool calls of message {place}") for _ in range(3 if call.arguments else 1)]
            calls.append(replace(call, name=made[0], arguments=dict([made[1:]]) if call.arguments else {}))
        written = all_reasoning or place >= last
        trace = word(message.reasoning or "", "reasoning_content" if written else None)
        content = word(message.content, names.get(message.role, "").format(place))
        messages.append(
            replace(message, content=content, reasoning=message.reasoning and trace, tool_calls=tuple(calls))
        )
    tools = [
        {**tool, "function": {**tool["function"], "name": word("x", "the declared tools")}} for tool in sample.tools
    ]
    kept = {made: name for made, name in words.items() if name}
    return replace(sample, messages=tuple(messages), tools=tuple(tools)), kept


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
    config_file, template_file = folder / TOKENIZER_CONFIG, folder / "chat_template.jinja"
    config = _config(config_file) if config_file.is_file() else {}
    source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: no chat_template.jinja and no chat_template in a tokenizer_config.json")
    return Template(str(folder), source, _tokens(config))


def _config(file: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: cannot be read ({error}): mend or remove it") from error
    return config


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a tokenizer_config.json, as variables of templates."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    words = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: word for name, word in words.items() if isinstance(word, str)}


def _not_known(name: str) -> jinja2.StrictUndefined:
    return jinja2.StrictUndefined(
        f"{name} is not known: name the tokenizer's folder, or put {TOKENIZER_CONFIG} beside the file"
    )


_UNKNOWN: dict[str, Any] = {name: _not_known(name) for name in ("bos_token", "eos_token")}
