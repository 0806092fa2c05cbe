"""Logs of Inspect (https://inspect.aisi.org.uk): every sample in `inspect view`, and others' logs in the store."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext import __version__
from nemo_ext.evaluation.benchmark import PLAIN
from nemo_ext.evaluation.store import Key, Sample, Score, Store, digest_of

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage

_SCORER = "nemo_ext"
_OTHER = re.compile(r"[^\w.@+-]+")
_ENDS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}
_READ_ENDS = {"max_tokens": "length", "model_length": "length"}


def write(
    found: Mapping[str, Any],
    store: Store,
    folder: Path,
    *,
    asked: Mapping[tuple[str, str, str, str], str] | None = None,
) -> list[Path]:
    """Write a log for each benchmark, prompt and mode; those of before are written anew.

    Samples without an answer are errors there, and those without a score have none.

    Args:
        found: what results.json has.
        store: its answers and scores.
        folder: folder of the logs.
        asked: hash of each question that counts, by benchmark, problem, prompt and mode; None takes all that the store
            has, and of several for one sample the one that is scored.

    Raises:
        ValueError: Inspect is not there.
    """
    _inspect()
    entries = found["benchmarks"]
    verifiers = {name: entry["verifier"] for name, entry in entries.items()}
    scores = {
        (key, asked): score
        for (key, asked, verifier), score in store.scores().items()
        if verifiers.get(key.benchmark) == verifier
    }
    newest: dict[Key, Sample] = {}
    for sample in store.answers():
        if asked is not None and asked.get(sample.key[:4]) != sample.asked:
            continue
        before = newest.get(sample.key)
        # An answer that is scored is of the question as it is now.
        if sample.key.benchmark in entries and (
            before is None or (sample.key, sample.asked) in scores or (before.key, before.asked) not in scores
        ):
            newest[sample.key] = sample
    tables: dict[tuple[str, str, str], list[Sample]] = defaultdict(list)
    for key in sorted(newest):
        tables[key.benchmark, key.prompt, key.mode].append(newest[key])
    prompts = store.prompts()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    # Inspect's writer runs an event loop, and the caller may have one.
    with ThreadPoolExecutor(1) as pool:
        for (name, prompt, mode), samples in tables.items():
            several = [each for each in (prompt, mode) if each != PLAIN]
            path = folder / (_OTHER.sub("-", "_".join([name, *several])) + ".eval")
            pool.submit(_write, path, found, name, several, samples, scores, prompts).result()
            written.append(path)
    return written


def read(path: Path) -> Iterator[tuple[Sample, Score | None]]:
    """Answers of a log, or of all logs of a folder, with their scores; None for what has none.

    Scores of others are told by the name of their scorer: C is 1, P is 0.5, I and N are 0.

    Raises:
        ValueError: Inspect is not there, or a file is no log.
    """
    _inspect()
    from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_samples

    found = list_eval_logs(str(path), descending=False) if path.is_dir() else [str(path)]
    for file in found:
        try:
            log = read_eval_log(file, header_only=True)
            samples: Any = (
                read_eval_log(file, resolve_attachments=True).samples or ()
                if log.eval.dataset.sample_ids is None
                else read_eval_log_samples(file, all_samples_required=False, resolve_attachments=True)
            )
            for sample in samples:
                yield from _read(log, sample)
        except (OSError, ValueError, KeyError) as error:
            where, said = getattr(file, "name", file), " ".join(str(error).split())[:200]
            raise ValueError(f"{where}: no log of Inspect that can be read ({said})") from None


def add(path: Path, store: Store) -> int:
    """Add the answers and scores of logs to a store; returns how many were not there.

    Raises:
        ValueError: see `read`.
    """
    there = {(sample.key, sample.asked) for sample in store.answers()}
    scored = set(store.scores())
    count = 0
    for sample, score in read(path):
        if (sample.key, sample.asked) not in there:
            there.add((sample.key, sample.asked))
            store.add(sample)
            count += 1
        if score is not None and (score.key, score.asked, score.digest) not in scored:
            scored.add((score.key, score.asked, score.digest))
            store.add_scores([score])
    return count


def _inspect() -> None:
    try:
        import inspect_ai.log  # noqa: F401
    except ImportError as error:
        raise ValueError(f"logs of Inspect need: pip install 'nemo_ext[inspect]' ({error})") from None


def _write(
    path: Path,
    found: Mapping[str, Any],
    name: str,
    several: Sequence[str],
    samples: Sequence[Sample],
    scores: Mapping[tuple[Key, str], Score],
    prompts: Mapping[str, Any],
) -> None:
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
        EvalStats,
        write_eval_log,
    )

    entry = found["benchmarks"][name]
    now = datetime.now(UTC).isoformat()
    problems = sorted({sample.key.problem for sample in samples})
    figures = {entry["metric"]: entry["accuracy"], **entry["metrics"]}
    if several:  # the entry's own figures are those of the first mode and of all prompts
        mine = [
            score.score for each in samples if (score := scores.get((each.key, each.asked))) and score.score is not None
        ]
        figures = {"mean": sum(mine) / len(mine) if mine else None}
    metrics = {metric: EvalMetric(name=metric, value=value) for metric, value in figures.items() if value is not None}
    identity = digest_of(found.get("digest"), found["model"], name, list(several))
    log = EvalLog(
        status="success",
        eval=EvalSpec(
            eval_id=identity,
            run_id=identity,
            task_id=identity,
            created=now,
            task="/".join([name, *several]),
            task_version=entry["verifier"],
            model=found["model"],
            model_base_url=found.get("endpoint"),
            dataset=EvalDataset(name=name, samples=len(problems), sample_ids=problems),
            config=EvalConfig(epochs=max(sample.key.sample for sample in samples) + 1),
            packages={"nemo_ext": __version__},
            metadata={"seed": found.get("seed"), "interval": entry.get("interval"), "about": entry.get("about")},
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=sum(not sample.problem for sample in samples),
            scores=[EvalScore(name=_SCORER, scorer=_SCORER, metrics=metrics)],
        ),
        stats=EvalStats(started_at=now, completed_at=now),
        samples=[
            _sample(sample, scores.get((sample.key, sample.asked)), prompts.get(sample.asked), found["model"])
            for sample in samples
        ],
    )
    write_eval_log(log, str(path), format="eval")


def _sample(sample: Sample, score: Score | None, shown: Any, model: str) -> "EvalSample":
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        ChatMessageUser,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.scorer import Score as InspectScore

    shown = shown if isinstance(shown, dict) else {}
    asked = [_message(message) for message in shown.get("messages") or ()]
    text = shown.get("context", shown.get("text", ""))
    if not asked and not text:
        text = json.dumps(shown, ensure_ascii=False)
    last = {
        "role": "assistant",
        "content": sample.answer,
        "reasoning_content": sample.reasoning,
        "tool_calls": sample.tool_calls,
    }
    # The turns of a conversation have the answers in them.
    said = [_message(message) for message in sample.turns or ([] if sample.logprobs else [last])]
    final = said[-1] if said and isinstance(said[-1], ChatMessageAssistant) else _message(last)
    usage = ModelUsage(
        input_tokens=sample.prompt_tokens or 0,
        output_tokens=sample.completion_tokens or 0,
        total_tokens=(sample.prompt_tokens or 0) + (sample.completion_tokens or 0),
        reasoning_tokens=sample.reasoning_tokens,
    )
    output = ModelOutput(
        model=model,
        choices=[ChatCompletionChoice(message=final, stop_reason=_ENDS.get(sample.finish_reason or "", "unknown"))],
        usage=usage,
        time=sample.seconds,
    )
    scores = None
    if score is not None and score.score is not None:
        own = {"digest": score.digest, "reference": score.reference, "found": score.found, "more": dict(score.more)}
        answer = score.found if score.found is not None else sample.answer
        scores = {_SCORER: InspectScore(value=score.score, answer=answer, explanation=score.why or None, metadata=own)}
    return EvalSample(
        id=sample.key.problem,
        epoch=sample.key.sample + 1,
        input=asked or text,
        choices=list(shown["choices"]) if shown.get("choices") else None,
        target="",
        messages=[*(asked or [ChatMessageUser(content=text)]), *said],
        output=output,
        scores=scores,
        metadata={
            "benchmark": sample.key.benchmark,
            "prompt": sample.key.prompt,
            "mode": sample.key.mode,
            "asked": sample.asked,
            "seed": sample.seed,
            "prompt_tokens": sample.prompt_tokens,
            "completion_tokens": sample.completion_tokens,
            "finish_reason": sample.finish_reason,
            "logprobs": list(sample.logprobs),
            "sizes": list(sample.sizes),
            "greedy": list(sample.greedy),
        },
        model_usage={model: usage},
        total_time=sample.seconds,
        error=EvalError(message=sample.problem, traceback="", traceback_ansi="") if sample.problem else None,
    )


def _message(message: Mapping[str, Any]) -> "ChatMessage":
    """A message of OpenAI's as one of Inspect's."""
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall

    content, role = message.get("content") or "", message.get("role")
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    if role in ("system", "developer"):
        return ChatMessageSystem(content=content)
    if role == "tool":
        return ChatMessageTool(content=content, tool_call_id=message.get("tool_call_id"))
    if role != "assistant":
        return ChatMessageUser(content=content)
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        wrong = None
        if not isinstance(arguments, dict):
            try:
                arguments = json.loads(arguments or "{}")
            except (TypeError, ValueError):
                arguments, wrong = {"arguments": str(arguments)}, "the arguments are no JSON"
        if not isinstance(arguments, dict):
            arguments, wrong = {"arguments": arguments}, "the arguments are no object"
        name = str(function.get("name") or "")
        calls.append(ToolCall(id=str(call.get("id") or number), function=name, arguments=arguments, parse_error=wrong))
    parts: Any = content
    if (reasoning := message.get("reasoning_content")) is not None:
        parts = [ContentReasoning(reasoning=reasoning), ContentText(text=content)]
    return ChatMessageAssistant(content=parts, tool_calls=calls or None)


def _read(log: "EvalLog", sample: "EvalSample") -> Iterator[tuple[Sample, Score | None]]:
    """A sample of a log: ours as it was written, another's under its task's name."""
    own = sample.metadata if "asked" in sample.metadata and "benchmark" in sample.metadata else {}
    key = Key(
        str(own.get("benchmark", _OTHER.sub("-", log.eval.task))),
        str(sample.id),
        str(own.get("prompt", PLAIN)),
        str(own.get("mode", PLAIN)),
        sample.epoch - 1,
    )
    asked = own.get("asked")
    if asked is None:
        messages = sample.input if isinstance(sample.input, str) else [each.text for each in sample.input]
        asked = digest_of("inspect", messages)
    choice = sample.output.choices[0] if sample.output.choices else None
    reasoning = None
    if choice is not None and not isinstance(choice.message.content, str):
        traces = [part.reasoning for part in choice.message.content if part.type == "reasoning"]
        reasoning = "\n".join(traces) if traces else None
    usage = sample.output.usage
    answer = Sample(
        key=key,
        asked=str(asked),
        seed=own.get("seed"),
        answer="" if choice is None or own.get("logprobs") else choice.message.text,
        reasoning=reasoning,
        tool_calls=[] if choice is None else [_call(call) for call in choice.message.tool_calls or ()],
        turns=_turns(sample),
        finish_reason=own.get("finish_reason")
        if own
        else None
        if choice is None
        else _READ_ENDS.get(choice.stop_reason, choice.stop_reason),
        prompt_tokens=own.get("prompt_tokens", None if usage is None else usage.input_tokens),
        completion_tokens=own.get("completion_tokens", None if usage is None else usage.output_tokens),
        reasoning_tokens=None if usage is None else usage.reasoning_tokens,
        seconds=sample.total_time,
        logprobs=own.get("logprobs", ()),
        sizes=own.get("sizes", ()),
        greedy=own.get("greedy", ()),
        problem="" if sample.error is None else sample.error.message or "an error",
    )
    scores = sample.scores or {}
    if not scores:
        yield answer, None
    for scorer, given in scores.items():
        value, more = _value(given.value)
        held = (given.metadata or {}) if own else {}
        digest = held.get("digest", digest_of("inspect", scorer))
        score = Score(
            key=key,
            asked=str(asked),
            digest=str(digest),
            score=value,
            reference=str(held.get("reference", digest_of(sample.target))),
            why=given.explanation or "",
            found=held.get("found", given.answer),
            more=held.get("more", more),
        )
        yield answer, score


def _value(value: Any) -> tuple[float | None, dict[str, float]]:
    """A score and further ones; of several the first number counts."""
    from inspect_ai.scorer import value_to_float

    def number(each: Any) -> float | None:
        if each is None or (isinstance(each, float) and math.isnan(each)):
            return None
        return float(value_to_float()(each))

    if isinstance(value, Mapping):
        numbers = {str(name): each for name, held in value.items() if (each := number(held)) is not None}
        return next(iter(numbers.values()), None), numbers
    if isinstance(value, Sequence) and not isinstance(value, str):
        found = [each for each in map(number, value) if each is not None]
        return (found[0] if found else None), {}
    return number(value), {}


def _call(call: Any) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": arguments}}


def _turns(sample: "EvalSample") -> list[dict[str, Any]]:
    """Messages after the question, where there is more than one answer."""
    answers = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
    start = len(sample.input) if isinstance(sample.input, list) else (answers or [0])[0]
    rest = sample.messages[start:]
    if len(rest) < 2:
        return []
    turns = []
    for message in rest:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if getattr(message, "tool_calls", None):
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        if getattr(message, "tool_call_id", None):
            turn["tool_call_id"] = message.tool_call_id
        if message.role == "assistant" and not isinstance(message.content, str):
            traces = [part.reasoning for part in message.content if part.type == "reasoning"]
            turn |= {"reasoning_content": "\n".join(traces)} if traces else {}
        turns.append(turn)
    return turns
