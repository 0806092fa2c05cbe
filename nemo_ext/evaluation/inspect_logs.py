"""Logs for `inspect view` (https://inspect.aisi.org.uk), with all samples in a store."""

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.evaluation.benchmark import PLAIN
from nemo_ext.evaluation.store import Sample, Score, Store, digest_of

_OTHER = re.compile(r"[^\w.@+-]+")
_ENDS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}
_ELSEWHERE = ("key", "answer", "reasoning", "tool_calls", "turns", "seconds", "problem")
"""Fields of a sample that have a dedicated place in a log; the others become metadata."""


def write(
    results: Mapping[str, Any], store: Store, folder: Path, *, asked: Mapping[tuple[str, ...], str]
) -> list[Path]:
    """Write one log per benchmark, prompt and mode, replacing earlier ones; return their paths.

    Samples without an answer are logged as errors, and samples without a score have no score in the log.

    Args:
        results: content of results.json.
        asked: mapping from (benchmark, problem, prompt, mode) to the current request's hash; other samples are ignored.

    Raises:
        ValueError: Inspect is not installed.
    """
    try:
        from inspect_ai.log import EvalLog, write_eval_log
    except ImportError as error:
        raise ValueError(
            f"evaluate.inspect=true requires inspect_ai ({error}); run pip install 'nemo_ext[inspect]'"
        ) from None
    tables: dict[tuple[str, str, str], list[Sample]] = defaultdict(list)
    for sample in sorted(store.answers(), key=lambda sample: sample.key):
        if asked.get(sample.key[:4]) == sample.asked:
            tables[sample.key.benchmark, sample.key.prompt, sample.key.mode].append(sample)
    prompts, scores, written = store.prompts(), store.scores(), []
    folder.mkdir(parents=True, exist_ok=True)
    # In a thread: Inspect's writer runs an event loop, and the caller may already have one.
    with ThreadPoolExecutor(1) as pool:
        for (name, prompt, mode), samples in tables.items():
            verifier = results["benchmarks"][name]["verifier"]
            rows = [(sample, scores.get((sample.key, sample.asked, verifier))) for sample in samples]
            variant = [part for part in (prompt, mode) if part != PLAIN]
            path = folder / (_OTHER.sub("-", "_".join([name, *variant])) + ".eval")
            shown = [_sample(sample, score, prompts.get(sample.asked), results["model"]) for sample, score in rows]
            log = EvalLog.model_validate({**_header(results, name, variant, rows), "samples": shown})
            pool.submit(write_eval_log, log, str(path), format="eval").result()
            written.append(path)
    return written


def _header(
    results: Mapping[str, Any], name: str, variant: Sequence[str], rows: Sequence[tuple[Sample, Score | None]]
) -> dict[str, Any]:
    entry, task, now = results["benchmarks"][name], "/".join([name, *variant]), datetime.now(UTC).isoformat()
    problems = sorted({sample.key.problem for sample, _ in rows})
    figures = {entry["metric"]: entry["accuracy"], **entry["metrics"]}
    if variant:  # the entry's own figures are over the first mode and all prompts
        values = [score.score for _, score in rows if score and score.score is not None]
        figures = {"mean": sum(values) / len(values) if values else None}
    metrics = {metric: {"name": metric, "value": value} for metric, value in figures.items() if value is not None}
    spec = {
        **dict.fromkeys(("eval_id", "run_id", "task_id"), digest_of(results.get("digest"), results["model"], task)),
        "created": now,
        "task": task,
        "task_version": entry["verifier"],
        "model": results["model"],
        "model_base_url": results.get("endpoint"),
        "dataset": {"name": name, "samples": len(problems), "sample_ids": problems},
        "config": {"epochs": max(sample.key.sample for sample, _ in rows) + 1},
        "packages": {"nemo_ext": __version__},
        "metadata": {"seed": results.get("seed"), "interval": entry.get("interval"), "about": entry.get("about")},
    }
    completed = sum(not sample.problem for sample, _ in rows)
    scores = [{"name": "nemo_ext", "scorer": "nemo_ext", "metrics": metrics}]
    totals = {"total_samples": len(rows), "completed_samples": completed, "scores": scores}
    return {"status": "success", "eval": spec, "results": totals, "stats": {"started_at": now, "completed_at": now}}


def _sample(sample: Sample, score: Score | None, shown: Any, model: str) -> dict[str, Any]:
    key, shown = sample.key, shown if isinstance(shown, dict) else {}
    text = shown.get("context") or shown.get("text") or json.dumps(shown, ensure_ascii=False)
    request = [_message(message) for message in shown.get("messages") or [{"role": "user", "content": text}]]
    final = _message({**asdict(sample), "role": "assistant", "content": sample.answer})
    # The turns of a conversation already contain the final answer.
    turns = [_message(message) for message in sample.turns] or ([] if sample.logprobs else [final])
    counted = {"input_tokens": sample.prompt_tokens or 0, "output_tokens": sample.completion_tokens or 0}
    usage = {**counted, "total_tokens": sum(counted.values()), "reasoning_tokens": sample.reasoning_tokens}
    choice = {"message": final, "stop_reason": _ENDS.get(sample.finish_reason or "", "unknown")}
    scores = {}
    if score is not None and score.score is not None:
        answer = sample.answer if score.found is None else score.found
        scores["nemo_ext"] = {"value": score.score, "answer": answer, "explanation": score.why or None}
        scores["nemo_ext"]["metadata"] = {"digest": score.digest, "reference": score.reference, "more": score.more}
    metadata = {name: value for name, value in asdict(sample).items() if name not in _ELSEWHERE}
    return {
        "id": key.problem,
        "epoch": key.sample + 1,
        "input": request if shown.get("messages") else text,
        "choices": shown.get("choices") or None,
        "target": "",
        "messages": request + turns,
        "output": {"model": model, "choices": [choice], "usage": usage, "time": sample.seconds},
        "scores": scores or None,
        "metadata": {"benchmark": key.benchmark, "prompt": key.prompt, "mode": key.mode, **metadata},
        "model_usage": {model: usage},
        "total_time": sample.seconds,
        "error": {"message": sample.problem, "traceback": "", "traceback_ansi": ""} if sample.problem else None,
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an OpenAI message to Inspect's format."""
    content, role = message.get("content") or "", message.get("role")
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    if role == "tool":
        return {"role": role, "content": content, "tool_call_id": message.get("tool_call_id")}
    if role != "assistant":
        return {"role": "system" if role in ("system", "developer") else "user", "content": content}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = function.get("arguments") or {}
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        converted = {"id": str(call.get("id") or number), "function": str(function.get("name") or "")}
        if not isinstance(arguments, dict):
            arguments, converted["parse_error"] = {"arguments": arguments}, "the arguments are not a JSON object"
        calls.append({**converted, "arguments": arguments})
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        content = [{"type": "reasoning", "reasoning": reasoning}, {"type": "text", "text": content}]
    return {"role": role, "content": content, "tool_calls": calls or None}
