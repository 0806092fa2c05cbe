"""Conversion of records in generation files to groups.

A record has a prompt and either a list of generations or one answer:

    {id?, messages | prompt, tools?, generations: [{text | message | messages, model?, score?, correct?, label?}]}
    {id?, messages | prompt, tools?, response | text | message, model?, score?, correct?, label?}
    {id?, prompt?, chosen, rejected, chosen_model?, rejected_model? ...}      existing pairs

Records with the same id form one group; only one of them needs the prompt. Without an id, the prompt is the id.
The answers in a run's rollouts.jsonl have no prompts; the tasks of `nemo-ext rl_tasks` have them under the same ids.
Answers with `truncated: true` are skipped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic.dataclasses import dataclass

from nemo_ext.chat.formats import FormatError, UnfinishedTrace, optional_text, to_sample
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.data.preference.group import Generation, Group, Side, json_digest, message_records
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.user_files import value_at
from nemo_ext.job.settings import STRICT

PROMPT_KEYS = ("messages", "prompt", "context", "conversations")
ANSWER_KEYS = ("response", "completion", "text", "message", "generation", "output")
_NEXT_TO_TEXT = ("reasoning", "tool_calls")
"""Keys next to an answer that is a string, as in the output of `nemo-ext generate`."""
_SHOWN = 60


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecordKeys:
    """Keys of a record or of one of its generations; `a.b` is key b of the object at key a.

    Attributes:
        id: key of the prompt's id.
        prompt: key of the prompt, a string or a list of messages; null for the first of `PROMPT_KEYS` that is present.
        history: key of earlier turns to insert before a single-turn prompt, such as synthetic context or self-talk.
        generations: key of the list of answers.
        answer: key of the answer in a generation or in a record with one answer; null for the first of `ANSWER_KEYS`.
        prompt_label: key of the prompt's label (harmful or safe).
    """

    id: str = "id"
    prompt: str | None = None
    history: str = "history"
    tools: str = "tools"
    task: str = "task"
    language: str = "language"
    prompt_label: str = "prompt_label"
    generations: str = "generations"
    answer: str | None = None
    model: str = "model"
    score: str = "score"
    correct: str = "correct"
    label: str = "label"
    chosen: str = "chosen"
    rejected: str = "rejected"


def group_key(record: Mapping[str, Any], keys: RecordKeys) -> str:
    """Return the key that identifies a record's group: the id, otherwise the prompt.

    Raises:
        FormatError: the record has neither an id nor a prompt.
    """
    identifier = value_at(record, keys.id)
    if not isinstance(identifier, bool) and isinstance(identifier, str | int) and identifier != "":
        return f"id {identifier}"
    prompt = _prompt(record, keys)
    if prompt is None:
        raise FormatError(f"the record has neither {keys.id} nor a prompt; its keys are {key_names(record)}")
    return f"prompt {json_digest(message_records(prompt.messages))}"


def key_names(record: Mapping[str, Any]) -> str:
    """List the keys of a record for an error message."""
    return ", ".join(sorted(map(str, record))) or "none"


def to_group(
    record: Mapping[str, Any],
    keys: RecordKeys,
    *,
    side: Side = "",
    pairs: bool = False,
    report: ReadReport | None = None,
) -> Group:
    """Convert one record to a group, with an empty prompt if it has none.

    Args:
        side: side in delta learning (strong or weak) of every generation in the record; "" for none.
        pairs: True if the record has `chosen` and `rejected`, which become two generations with these labels.
        report: report in which generations with an unfinished trace are skipped; None to raise an error instead.

    Raises:
        FormatError: the record is invalid; the message contains the path within the record.
    """
    sample = None if pairs else _prompt(record, keys)
    task, language = (optional_text(value_at(record, key), key) for key in (keys.task, keys.language))
    tools = sample.tools if sample else _tools(record, keys)
    if pairs:
        prompt, generations = _ready_pair(record, keys)
    else:
        prompt = sample.messages if sample else ()
        many = value_at(record, keys.generations)
        if many is None:
            # Truncated rollouts would teach a model to end there.
            cut = record.get("truncated") is True
            if cut and report is not None:
                report.skip("truncated answer", str(value_at(record, keys.id)))
            generations = [] if cut or _is_task(record, sample, keys) else [_generation(record, keys, "", side)]
        else:
            generations = _listed(many, keys, side, report)
    identifier = value_at(record, keys.id)
    return Group(
        id=("" if identifier is None else str(identifier)) or json_digest(message_records(prompt)),
        prompt=prompt,
        generations=tuple(generations),
        tools=tools,
        task=task,
        language=language.lower(),
        label=optional_text(value_at(record, keys.prompt_label), keys.prompt_label),
    )


def merged(groups: Sequence[Group], report: ReadReport, where: str = "") -> Group | None:
    """Merge groups with the same id, regardless of their order; None if they have no prompt or different prompts.

    Duplicate generations, and groups for which the result is None, are counted in `report` under the place `where`.
    """
    prompts = {json.dumps(message_records(group.prompt)): group.prompt for group in groups if group.prompt}
    if len(prompts) != 1:
        report.skip("no prompt" if not prompts else "prompts of one id differ", where)
        return None
    by_key = {generation.key: generation for group in groups for generation in group.generations}
    distinct: dict[str, Generation] = {}
    for _, generation in sorted(by_key.items()):
        distinct.setdefault(
            json.dumps([generation.model, generation.side, message_records(generation.messages)]), generation
        )
    total = sum(len(group.generations) for group in groups)
    if total > len(distinct):
        report.skip("identical generations", where, count=total - len(distinct))

    def first(name: str) -> str:
        return min((value for group in groups if (value := getattr(group, name))), default="")

    return replace(
        groups[0],
        prompt=next(iter(prompts.values())),
        generations=tuple(distinct.values()),
        id=first("id"),
        task=first("task"),
        language=first("language"),
        label=first("label"),
    )


def completion(value: Any, where: str) -> tuple[Message, ...]:
    """Read an answer: a string, a message, or messages that begin and end with the assistant's.

    `where` is the path of the value in its record, for error messages.

    Raises:
        FormatError: the value is something else.
    """
    turns = value
    if isinstance(value, str):
        turns = [{"role": "assistant", "content": value}]
    elif isinstance(value, Mapping):
        turns = [{"role": "assistant", **value}]
    try:
        messages = to_sample({"messages": turns}, id=where, format="openai").messages
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from None
    if messages[0].role != "assistant" or messages[-1].role != "assistant":
        roles = f"{messages[0].role} and {messages[-1].role}"
        raise FormatError(f"{where}: the first and last message must be the assistant's, not {roles}")
    return messages


def number(value: Any, where: str) -> float | None:
    """Return a value of a record as a float, or None if it is None; `where` is its path, for error messages.

    Raises:
        FormatError: the value is not a finite number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise FormatError(f"{where}: expected a number, not {str(value)[:_SHOWN]!r}")
    return float(value)


def _prompt(record: Mapping[str, Any], keys: RecordKeys) -> Sample | None:
    name = keys.prompt or next((key for key in PROMPT_KEYS if record.get(key) is not None), None)
    value = None if name is None else value_at(record, name)
    if name is None or value is None:
        return None
    kind = "conversations" if name == "conversations" else "messages"
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    prompt = to_sample({kind: turns, "tools": value_at(record, keys.tools)}, id=name)
    if (history := value_at(record, keys.history)) is not None:
        if any(message.role == "assistant" for message in prompt.messages):
            raise FormatError(f"{keys.history}: {name} already has earlier turns; remove them or {keys.history}")
        system = [message for message in prompt.messages if message.role == "system"]
        earlier = to_sample({"messages": history}, id=keys.history, format="openai").messages
        if system and earlier[0].role == "system":
            raise FormatError(f"{keys.history} and {name} both begin with a system message: keep only one of them")
        prompt = replace(prompt, messages=(*system, *earlier, *prompt.messages[len(system) :]))
    if prompt.messages[-1].role not in ("user", "tool"):
        raise FormatError(f"{name}: the last message must be the user's or a tool's, not {prompt.messages[-1].role}")
    return prompt


def _is_task(record: Mapping[str, Any], prompt: Sample | None, keys: RecordKeys) -> bool:
    """Return whether a record is an RL task without an answer; `prompt` is its prompt, or None if it has none."""
    task = prompt is not None and {"id", "environment", "reference"} <= record.keys()
    answers = ANSWER_KEYS if keys.answer is None else (keys.answer,)
    return task and not any(value_at(record, key) is not None for key in answers)


def _ready_pair(record: Mapping[str, Any], keys: RecordKeys) -> tuple[tuple[Message, ...], list[Generation]]:
    """Read an existing pair; return its prompt, and its chosen and its rejected generation.

    If the pair consists of two whole conversations, the prompt is the messages with which both begin.
    """
    sample = _prompt(record, keys)
    sides = {}
    for key in (keys.chosen, keys.rejected):
        value = value_at(record, key)
        if value is None:
            raise FormatError(f"expected an answer under {key!r}, but the record's keys are {key_names(record)}")
        whole = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        first = value[0] if whole else None
        if isinstance(first, Mapping) and first.get("role", first.get("from")) not in ("assistant", "gpt"):
            sides[key] = to_sample({"messages" if "role" in first else "conversations": value}, id=key).messages
        else:
            sides[key] = completion(value, key)
    chosen, rejected = sides.values()
    common = 0
    if sample is None or chosen[0].role != "assistant":
        limit = min(len(chosen), len(rejected)) - 1
        while common < limit and chosen[common] == rejected[common]:
            common += 1
        if common == 0:
            raise FormatError(
                f"the pair has no prompt, and {keys.chosen} and {keys.rejected} do not start with the same "
                "messages: add a prompt"
            )
    prompt = sample.messages if sample is not None and not common else chosen[:common]
    generations = []
    for label, messages in zip(("chosen", "rejected"), (chosen[common:], rejected[common:]), strict=True):
        if any(message.role == "user" for message in messages) or messages[-1].role != "assistant":
            raise FormatError(f"{label}: expected chosen and rejected to be equal up to the last user message")
        score = number(value_at(record, f"{label}_score"), f"{label}_score")
        model = optional_text(value_at(record, f"{label}_model"), f"{label}_model")
        generations.append(Generation(messages=messages, model=model, score=score, label=label))
    return prompt, generations


def _listed(many: Any, keys: RecordKeys, side: Side, report: ReadReport | None) -> list[Generation]:
    if not isinstance(many, Sequence) or isinstance(many, str) or not many:
        raise FormatError(f"{keys.generations}: expected a list of generations, not {str(many)[:_SHOWN]!r}")
    generations = []
    for index, entry in enumerate(many):
        where = f"{keys.generations}[{index}]"
        if isinstance(entry, str):
            entry = {"text": entry}
        if not isinstance(entry, Mapping):
            raise FormatError(f"{where}: expected an object or a string, not {str(entry)[:_SHOWN]!r}")
        try:
            generations.append(_generation(entry, keys, where, side))
        except UnfinishedTrace as error:
            if report is None:
                raise
            report.skip("answer with an unfinished trace", str(error))
    return generations


def _generation(entry: Mapping[str, Any], keys: RecordKeys, where: str, side: Side) -> Generation:
    prefix = f"{where}." if where else ""
    answer = keys.answer
    if answer is None:
        known = (*ANSWER_KEYS, "messages") if where else ANSWER_KEYS
        answer = next((key for key in known if entry.get(key) is not None), None)
    value = None if answer is None else value_at(entry, answer)
    if value is None:
        raise FormatError(f"{prefix}{answer or 'text'}: there is no answer; the record's keys are {key_names(entry)}")
    if isinstance(value, str) and (more := {key: entry[key] for key in _NEXT_TO_TEXT if entry.get(key)}):
        value = {"content": value, **more}
    correct = value_at(entry, keys.correct)
    if correct is not None and correct not in (0, 1):
        raise FormatError(f"{prefix}{keys.correct}: expected true or false, not {str(correct)[:_SHOWN]!r}")
    return Generation(
        messages=completion(value, f"{prefix}{answer}"),
        model=optional_text(value_at(entry, keys.model), f"{prefix}{keys.model}"),
        side=side,
        score=number(value_at(entry, keys.score), f"{prefix}{keys.score}"),
        correct=None if correct is None else bool(correct),
        label=optional_text(value_at(entry, keys.label), f"{prefix}{keys.label}"),
    )


def _tools(record: Mapping[str, Any], keys: RecordKeys) -> tuple[Mapping[str, Any], ...]:
    messages = [{"role": "user", "content": ""}]
    return to_sample({"messages": messages, "tools": value_at(record, keys.tools)}, id="tools").tools
