"""Chat templates, which render a conversation as the model's input text and mark the spans to train on.

A template is a Jinja file in Hugging Face's dialect, so the same file serves for training and, as
`tokenizer.chat_template`, for inference. Generated text lies between `{% generation %}` and `{% endgeneration %}`, and
starts where the template's generation prompt ends. Data never become markup, as control tokens in the data are quoted
before rendering.
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

# Unicode noncharacters, reserved for internal use. A mark in the data is replaced by ESCAPE and a digit.
_OPEN, _CLOSE, _QUOTE, _UNQUOTE, _LAST_TURN, _ESCAPE = _MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"
_ANY_MARK = re.compile(f"([{_MARKS}])")
_ANSWER = "\ue000"  # from the private use area, which no template writes


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation rendered as text.

    Attributes:
        text: complete text.
        trained: spans that the model writes, as (start, end) character offsets, in order.
        quoted: spans of the data that spell a control token, but must be tokenized as ordinary text.
        thinking: True if the text was rendered in the mode with reasoning.
    """

    text: str
    trained: tuple[Span, ...]
    quoted: tuple[Span, ...] = ()
    thinking: bool = False

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """Pieces of the text as (text, trained) pairs, where `trained` says whether to train on the piece."""
        pieces = []
        position = 0
        for start, end in self.trained:
            pieces += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        pieces.append((self.text[position:], False))
        return [(text, trained) for text, trained in pieces if text]


class ControlTokens:
    """Finds text in the data that spells a control token, and quotes it.

    Args:
        tokens: names of the tokens; of overlapping names, the longest is matched.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
        # Two patterns, because a search for only the names, which all begin with "<", is many times faster.
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._all = re.compile("|".join([*map(re.escape, longest_first), f"[{_MARKS}]"]))

    def quoted(self, value: Any) -> Any:
        """Return the value with all token names in its strings quoted by marks; the same object if there are none."""
        if isinstance(value, str):
            # Few texts contain a name and none should contain a mark: two quick checks avoid the slow substitution.
            matches = self._names.search(value) or (not value.isascii() and _ANY_MARK.search(value))
            return self._all.sub(_quote, value) if matches else value
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
        variables: additional template variables, such as `bos_token`; None if the tokenizer is unknown, in which
            case a template that writes `bos_token` or `eos_token` fails.
    """

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.source = source
        self.variables = dict(variables or {})
        self._unknown = _UNKNOWN if variables is None else {}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            # Each rendering copies the globals, which is slow for a ChainMap.
            self._template.globals = dict(self._template.globals)
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"chat template {name} is not valid Jinja in line {error.lineno} ({error.message}): correct it"
            ) from error
        texts = [node.data for node in parsed.find_all(TemplateData)]
        texts += [node.value for node in parsed.find_all(Const) if isinstance(node.value, str)]
        self.literals = "\0".join(texts)
        self.marks_generation = _OPEN in self.literals

    def __reduce__(self) -> tuple[type["Template"], tuple[str, str, dict[str, Any] | None]]:
        return Template, (self.name, self.source, None if self._unknown else self.variables)

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Template":
        """Load one of nemo_ext's templates by name, or a template from a file or a Hugging Face tokenizer's directory.

        A published checkpoint's template is in its directory.

        Raises:
            ValueError: the template or file does not exist, or is not valid Jinja.
        """
        name = str(name_or_path)
        if name in names():
            return cls(name, (FOLDER / f"{name}.jinja").read_text())
        path = Path(name).expanduser()
        if path.is_dir():
            return _load_folder(path)
        if path.is_file():
            config = path.parent / TOKENIZER_CONFIG
            return cls(name, path.read_text(), _tokens(_config(config)) if config.is_file() else None)
        raise ValueError(f"{name!r} is neither a chat template nor a file or directory; {nearest(name, names())}")

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "Template":
        """Return the chat template of a Hugging Face tokenizer.

        Raises:
            ValueError: the tokenizer does not have a chat template.
        """
        source = getattr(tokenizer, "chat_template", None)
        if not isinstance(source, str):
            raise ValueError("the tokenizer has no chat template: set template to the name or path of one")
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
            sample: conversation; its `thinking` sets the mode, by default the mode of its last turn (`thinks`).
            thinking: mode that overrides the sample's.
            train: spans to train on: all that the template marks, or only those after the last user message.
            control: control tokens; data spans that spell one are listed in `Rendered.quoted`.
            add_generation_prompt: True to end with the prompt for the next answer, in the requested mode.

        Raises:
            ValueError: the template rejects the sample, or the mode is off and the sample's last turn has reasoning.
        """
        mode = thinking if thinking is not None else thinks(sample)
        if not mode and not add_generation_prompt and has_reasoning(last_turn(sample.messages)):
            raise ValueError(
                f"sample {sample.id}: thinking is off, but its last turn has reasoning: remove the reasoning, or turn "
                "thinking on"
            )
        as_text = any(message.tool_calls for message in sample.messages) and self.takes_argument_text
        values = [openai_messages(sample.messages, arguments_as_text=as_text, names=True), list(sample.tools) or None]
        messages, tools = ((control or _NO_TOKENS).quoted(value) for value in values)
        if train == "last_turn":
            user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
            if user is not None:
                messages[user]["content"] = _LAST_TURN + messages[user]["content"]
        try:
            text = self._written(messages, tools, enable_thinking=mode, add_generation_prompt=add_generation_prompt)
        except (ArithmeticError, RecursionError, ValueError) as error:
            # The sandbox refuses ranges above jinja2.sandbox.MAX_RANGE.
            raise ValueError(
                f"sample {sample.id}: chat template {self.name} fails ({error}); fix the template"
            ) from error
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(
                f"sample {sample.id}: chat template {self.name} cannot render it ({error}); correct the sample, or use "
                "another template"
            ) from error
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
        """Return the texts to train on: every answer after the prompt from which the model will generate it.

        Args:
            turns: treatment of earlier turns whose reasoning the template drops, since "for a given generation, only
                reasoning content from the current turn is materialized into the prompt" (Nemotron 3 Nano, figure 4).
                split: one text per turn, which ends with it and is trained on only there, so that every answer is
                trained on once, while prompts repeat. last: only the last turn. whole: one text, trained on where the
                template marks it.
            control: see `render`.

        For a template without marks, the prompt of each answer is rendered, and the text after it is trained on. The
        result is one text if every answer in it follows its prompt, otherwise (except with `whole`) one text per
        answer. If the template drops reasoning, a sample with reasoning is trained on only in its last turn.

        Raises:
            ValueError: see `render` and `check_complete`. Also raised if, in a template without marks, an answer does
                not start where its prompt ends.
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
                f"sample {sample.id}: chat template {self.name} does not render message "
                f"{places[spans.index(None)]} after its prompt: mark generated text with {{% generation %}} and "
                "{% endgeneration %}" + ("" if divide else ", or train on one text per answer, with turns=split")
            )
        return texts

    def _after_its_prompt(self, sample: Sample, place: int, text: str) -> Span | None:
        """Return the span in `text` of the answer in message `place`; None if `text` does not begin with its prompt."""
        message = sample.messages[place]
        before, with_it = (replace(sample, messages=sample.messages[:end]) for end in (place, place + 1))
        reasons = has_reasoning(last_turn(with_it.messages))
        # The line break after an answer belongs to the following text.
        answered = self.render(with_it, thinking=reasons or thinks(sample)).text.rstrip()
        for mode in dict.fromkeys((thinks(sample), message.reasoning is not None)):
            prompt = self.render(before, thinking=mode, add_generation_prompt=True).text
            if text.startswith(prompt) and text.startswith(answered):
                return len(prompt), len(answered)
        return None

    def check_complete(self, sample: Sample, *, thinking: bool) -> None:
        """Check that the rendered text contains all parts of a sample, except user messages, which no template omits.

        Texts are replaced by unique words before rendering, because a short text could occur anywhere.

        Raises:
            ValueError: the template rejects the sample, or omits a part other than the reasoning of earlier turns.
        """
        probe, words = _probe(sample, all_reasoning=not self.drops_reasoning)
        try:
            text = self.render(probe, thinking=thinking).text
        except ValueError:
            # A template that parses texts cannot parse the replaced ones; any other error also concerns the sample.
            self.render(sample, thinking=thinking, add_generation_prompt=sample.messages[-1].role != "assistant")
            return
        if missing := [name for word, name in words.items() if word not in text]:
            raise ValueError(f"sample {sample.id}: chat template {self.name} omits {missing[0]}: use another template")

    @cached_property
    def takes_argument_text(self) -> bool:
        """Whether call arguments must be JSON strings, as objects fail or are rendered in Python's notation."""
        call = ToolCall(name="f", arguments={"key": "value"}, id="abcdefghi")
        conversation = (Message(role="user", content="a"), Message(role="assistant", tool_calls=(call,)))
        texts = {}
        for as_text in (False, True):
            messages = openai_messages(conversation, arguments_as_text=as_text)
            with suppress(jinja2.TemplateError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
                texts[as_text] = self._written(messages, None, enable_thinking=False, add_generation_prompt=False)
        object_fails = False not in texts or "{'key': 'value'}" in texts[False]
        return object_fails and '{"key": "value"}' in texts.get(True, "")

    @cached_property
    def has_modes(self) -> bool:
        """Whether the template's prompt differs between the modes with and without reasoning."""
        question = Sample(id="has_modes", messages=(Message(role="user", content="a"),))
        on, off = (self.render(question, thinking=mode, add_generation_prompt=True).text for mode in (True, False))
        return on != off

    @cached_property
    def closing(self) -> str:
        """Text that ends an answer's turn; "" if the template rejects a plain question and answer."""
        conversation = (Message(role="user", content="a"), Message(role="assistant", content=_ANSWER))
        try:
            _, answer, closing = self.render(Sample(id="closing", messages=conversation)).text.rpartition(_ANSWER)
        except ValueError:
            return ""
        return closing if answer else ""  # a template for multi-part content does not write plain text

    @cached_property
    def drops_reasoning(self) -> bool:
        """Whether the template omits the reasoning of earlier turns but not that of the last turn."""
        turns = [Message(role="user", content="a"), Message(role="assistant", content="b", reasoning="earlier trace")]
        turns += [Message(role="user", content="c"), Message(role="assistant", content="d", reasoning="last trace")]
        try:
            text = self.render(Sample(id="drops_reasoning", messages=tuple(turns))).text
        except ValueError:  # such as a template without second turns, which reports samples that have them by id
            return False
        return "last trace" in text and "earlier trace" not in text


def names() -> list[str]:
    """Return the names of nemo_ext's own templates."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def end_tokens(tokenizer: Any, template: Template | None = None, generation: Any = None) -> frozenset[int]:
    """Return the ids that end an answer, from the generation config, the tokenizer and the template's end of turn.

    Args:
        template: chat template; None for the tokenizer's, if it has one.
        generation: transformers' GenerationConfig; None if there is none.
    """
    listed = getattr(generation, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])} - {None}
    if template is None and isinstance(getattr(tokenizer, "chat_template", None), str):
        template = Template.of_tokenizer(tokenizer)
    closing = template.closing.lstrip() if template is not None else ""
    # A turn that ends with plain text has no end token: the text's first token may occur anywhere in an answer.
    ends |= {*tokenizer.encode(closing, add_special_tokens=False)[:1]} & tokenizer.added_tokens_decoder.keys()
    return frozenset(ends)


def thinks(sample: Sample) -> bool:
    """Return the mode of a sample: its `thinking`; if that is None, whether its last turn has reasoning."""
    return has_reasoning(last_turn(sample.messages)) if sample.thinking is None else sample.thinking


def last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the last user message; all messages if there is no user message."""
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    return messages[users[-1] + 1 :] if users else messages


def split_turns(sample: Sample) -> list[Sample]:
    """Split a sample into one per answered turn, with all earlier messages; ids get suffixes `#1`, `#2`, ...

    Each new sample has the mode of its last turn. A sample without reasoning is not split unless its mode is on, since
    the prompts of its turns are prefixes of the whole sample.
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
    """Replace each text of a sample with a unique word, to find out which texts a template renders.

    Returns the copy, and a mapping from each word that must be rendered to a description of its text. The reasoning of
    earlier turns must be rendered only if `all_reasoning` is True.
    """
    words: dict[str, str] = {}

    def word(text: str, stands_for: str | None) -> str:
        if not text.strip():
            return text
        probe = f"probe{len(words)}x"
        words[probe] = stands_for or ""
        return probe

    messages = []
    last = len(sample.messages) - len(last_turn(sample.messages))
    names = {"system": "the system message", "assistant": "the text of message {}", "tool": "the tool's answer {}"}
    for place, message in enumerate(sample.messages):
        calls = []
        for call in message.tool_calls:
            probes = [word("x", f"the tool calls of message {place}") for _ in range(3 if call.arguments else 1)]
            calls.append(replace(call, name=probes[0], arguments=dict([probes[1:]]) if call.arguments else {}))
        written = all_reasoning or place >= last
        trace = word(message.reasoning or "", "reasoning_content" if written else None)
        content = word(message.content, names.get(message.role, "").format(place))
        messages.append(
            replace(message, content=content, reasoning=message.reasoning and trace, tool_calls=tuple(calls))
        )
    tools = [
        {**tool, "function": {**tool["function"], "name": word("x", "the declared tools")}} for tool in sample.tools
    ]
    required = {probe: name for probe, name in words.items() if name}
    return replace(sample, messages=tuple(messages), tools=tuple(tools)), required


def _quote(match: re.Match[str]) -> str:
    found = match[0]
    if found in _MARKS:
        return f"{_ESCAPE}{_MARKS.index(found)}"
    return f"{_QUOTE}{found}{_UNQUOTE}"


def _read(text: str, *, thinking: bool) -> Rendered:
    """Convert the marks in a template's output to spans."""
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
    """The Jinja tag `{% generation %}`, which puts marks around generated text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = [Output([TemplateData(_OPEN)]), *body, Output([TemplateData(_CLOSE)])]
        return [Scope(marked, lineno=line)]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment for Hugging Face templates, with the names that transformers defines."""
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
    """Convert a value to JSON: transformers' `tojson` filter, with options that templates may also pass by position."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _load_folder(folder: Path) -> Template:
    """Load the template in a Hugging Face tokenizer's directory."""
    config_file, template_file = folder / TOKENIZER_CONFIG, folder / "chat_template.jinja"
    config = _config(config_file) if config_file.is_file() else {}
    source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json: name another "
            "folder, a file, or a chat template of nemo_ext"
        )
    return Template(str(folder), source, _tokens(config))


def _config(file: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): fix or remove it") from error
    return config


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer_config.json, as template variables."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    words = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: word for name, word in words.items() if isinstance(word, str)}


_UNKNOWN: dict[str, Any] = {
    name: jinja2.StrictUndefined(
        f"{name} is unknown: pass the tokenizer's directory, or put {TOKENIZER_CONFIG} next to the file"
    )
    for name in ("bos_token", "eos_token")
}
