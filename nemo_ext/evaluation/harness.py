"""Tasks of lm-evaluation-harness over an endpoint, with every answer in the store.

What is asked and how it is scored is lm-evaluation-harness's own; how it is sent, tried again and kept is ours. With
`repeats`, each answer is scored by itself under a seed of its own; lm-evaluation-harness scores the first one alone.
Task files are data here: nothing is downloaded, and no Python of theirs runs unless it is trusted.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.endpoint.client import EndpointGone, Request
from nemo_ext.endpoint.failures import REFUSED
from nemo_ext.evaluation.ask import Question
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark, Kind
from nemo_ext.evaluation.likelihood import Likelihoods, Scored
from nemo_ext.evaluation.problems import Problem
from nemo_ext.evaluation.results import Plan
from nemo_ext.evaluation.store import Key, Sample, Score, Store, digest_of
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import Count, nearest

try:
    import lm_eval
    import lm_eval.api.model
except ImportError as error:
    raise ValueError(
        f"tasks of lm-evaluation-harness need: pip install 'nemo_ext[harness]' ({error}): or leave them out"
    ) from None

_AHEAD = 256
"""Documents in work at a time; the client sends fewer requests."""
_MOST_TOKENS = 256
"""Tokens of an answer where a task says nothing, as in lm-evaluation-harness."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_KINDS: dict[str, Kind] = {"loglikelihood_rolling": "bits", "generate_until": "generate"}
_BITS = "bits_per_byte"


class Failed(Exception):
    """A task that cannot be evaluated, and why."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of tasks.

    Attributes:
        plans: what was asked and how it is scored, for `results`.
        metrics: benchmark -> metric -> value over all documents, as lm-evaluation-harness aggregates it; with several
            tasks `TASK/METRIC`. They come from the first answer to each document.
        missing: benchmark -> why it could not be evaluated.
    """

    plans: list[Plan] = field(default_factory=list)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


async def run(
    benchmarks: Sequence[Benchmark],
    folder: Path,
    likelihoods: Likelihoods,
    store: Store,
    *,
    limit: Count | None = None,
    seed: int = 1234,
    chat: bool = False,
    trust_code: bool = False,
) -> Ran:
    """Evaluate tasks, groups or tags by their names (`Benchmark.task`); what the store has is not asked again.

    Args:
        benchmarks: what to evaluate; the setting `headline` names the metric that counts, else the task's first one.
        folder: folder of the task files.
        likelihoods: log-likelihoods at the endpoint, and through its client the answers.
        store: where answers and scores are kept.
        limit: most documents of a task, the first ones.
        seed: seed of answers and of the choice of examples.
        chat: whether prompts go through the tokenizer's chat template.
        trust_code: whether Python that task files name may run.

    Raises:
        ValueError: there is no such folder.
        EndpointGone: nobody has answered for longer than the client's patience.
    """
    if not folder.is_dir():
        raise ValueError(f"evaluate.harness_tasks={folder}: no such folder")
    names = {benchmark.name for benchmark in benchmarks}
    there = {
        (sample.key, sample.asked): sample
        for sample in store.answers()
        if sample.key.benchmark in names and not sample.problem
    }
    loop = asyncio.get_running_loop()

    def wait[Given](work: Coroutine[Any, Any, Given]) -> Given:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def work() -> Ran:
        ran = Ran()
        with _offline(trust_code):
            from lm_eval.tasks import TaskManager

            manager = TaskManager(include_path=str(folder), include_defaults=False)
            for benchmark in benchmarks:
                try:
                    tasks = _tasks(benchmark, manager, folder, trust_code)
                    model = EndpointModel(benchmark, likelihoods, store, there, wait, seed=seed, several=len(tasks) > 1)
                    _evaluate(benchmark, tasks, model, store, ran, limit=limit, seed=seed, chat=chat)
                except EndpointGone:
                    raise
                except Exception as error:  # task files fail in their own ways
                    said = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
                    ran.missing[benchmark.name] = f"task {benchmark.task}: {' '.join(said.split())[:300]}"
        return ran

    return await asyncio.to_thread(work)


class EndpointModel(lm_eval.api.model.LM):
    """A model behind an endpoint as lm-evaluation-harness asks it, one benchmark's requests at a time.

    Args:
        benchmark: the benchmark that asks.
        likelihoods: log-likelihoods at the endpoint, and through its client the answers.
        store: where answers are kept.
        there: answers that are kept already, by key and hash of the request.
        wait: runs a coroutine in the client's event loop, from the thread that calls this model.
        seed: seed of all answers.
        several: whether the benchmark has several tasks.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        likelihoods: Likelihoods,
        store: Store,
        there: dict[tuple[Key, str], Sample],
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
        *,
        seed: int,
        several: bool = False,
    ) -> None:
        super().__init__()
        self.benchmark, self.likelihoods, self.store, self.there = benchmark, likelihoods, store, there
        self.wait, self.seed, self.several = wait, seed, several
        self.asked: dict[int, tuple[Question, int]] = {}
        """Question of each request by its id(), and its place in it."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of continuations, and whether each is what the model would say."""
        return self._answered(requests, lambda sample, place: (sample.logprobs[place], sample.greedy[place]))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts."""
        return self._answered(requests, lambda sample, place: sample.logprobs[place])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers."""
        return self._answered(requests, lambda sample, place: sample.answer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's chat template writes it."""
        if self.likelihoods.tokens is None:
            raise Failed("chat: needs the model's tokenizer: files_from=FOLDER")
        rendered: str = self.likelihoods.tokens.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return rendered

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches that are not used."""
        return ""

    def _answered(self, requests: Sequence[Any], value: Callable[[Sample, int], Any]) -> list[Any]:
        """Values of requests, of which each stands as many times as it has repeats.

        Raises:
            Failed: an answer did not come.
        """
        numbers: dict[int, int] = defaultdict(int)
        wanted: dict[Key, Question] = {}
        order: list[tuple[Key, int]] = []
        self._ask_about(requests)
        for request in requests:
            question, place = self.asked[id(request)]
            key = question.key(numbers[id(request)])
            numbers[id(request)] += 1
            wanted[key] = question
            order.append((key, place))
        self.wait(self._all(wanted))
        samples = {key: self.there[key, question.asked] for key, question in wanted.items()}
        return [value(samples[key], place) for key, place in order]

    def _ask_about(self, requests: Sequence[Any]) -> None:
        """Makes a question of the requests of each document, or one of each where texts are generated."""
        grouped: dict[tuple[Any, ...], list[Any]] = {}
        for request in {id(each): each for each in requests}.values():
            alone = request.idx if request.request_type == "generate_until" else None
            grouped.setdefault((request.task_name, request.doc_id, request.request_type, alone), []).append(request)
        for (task, document, kind, alone), group in grouped.items():
            group.sort(key=lambda request: request.idx)
            name = f"{task}/{document}" if self.several else str(document)
            problem = Problem(
                id=f"{name}.{alone}" if alone else name,
                domain=str(task) if self.several else "",
                prompts={kind: str(group[0].args[0])},
                reference={},
                choices=tuple(each.args[1] for each in group) if kind == "loglikelihood" else (),
            )
            shown, body = _shown(kind, [each.args for each in group])
            question = Question(
                benchmark=self.benchmark, problem=problem, prompt=kind, mode=PLAIN, shown=shown, body=body
            )
            self.asked |= {id(each): (question, place) for place, each in enumerate(group)}

    async def _all(self, wanted: Mapping[Key, Question]) -> None:
        left = [(key, question) for key, question in wanted.items() if (key, question.asked) not in self.there]
        turns = asyncio.Semaphore(_AHEAD)
        problems: list[str] = []

        async def one(key: Key, question: Question) -> None:
            async with turns:
                self.store.add_prompt(question.asked, question.shown)
                sample = await self._sample(key, question)
                self.store.add(sample)
                if sample.problem:
                    problems.append(sample.problem)
                else:
                    self.there[key, question.asked] = sample

        async with asyncio.TaskGroup() as group:
            for key, question in left:
                group.create_task(one(key, question))
        if problems:
            raise Failed(f"{len(problems)} of {len(wanted)} answers did not come, the first for: {problems[0]}")

    async def _sample(self, key: Key, question: Question) -> Sample:
        if question.prompt == "generate_until":
            return await self._generated(key, question)
        if question.prompt == "loglikelihood":
            pairs = question.shown.get("pairs") or [
                [question.shown["context"], choice] for choice in question.shown["choices"]
            ]
            contexts: dict[str, list[int]] = defaultdict(list)
            for place, (context, _) in enumerate(pairs):
                contexts[context].append(place)
            parts = await asyncio.gather(
                *(
                    self.likelihoods.continuations(context, [pairs[place][1] for place in places])
                    for context, places in contexts.items()
                )
            )
            by_place = {
                place: each
                for places, found in zip(contexts.values(), parts, strict=True)
                for place, each in zip(places, found, strict=True)
            }
            scored: list[Scored] = [by_place[place] for place in range(len(pairs))]
        else:
            scored = [await self.likelihoods.rolling(question.shown["text"])]
        return Sample(
            key=key,
            asked=question.asked,
            logprobs=[] if any(each.problem for each in scored) else [each.logprob for each in scored],
            sizes=[each.bytes for each in scored],
            greedy=[each.greedy for each in scored],
            prompt_tokens=sum(each.tokens for each in scored),
            problem=next((each.problem for each in scored if each.problem), ""),
        )

    async def _generated(self, key: Key, question: Question) -> Sample:
        client, tokens = self.likelihoods.client, self.likelihoods.tokens
        text, body = question.shown["text"], dict(question.body)
        most = body["max_tokens"]
        prompt: str | list[int] = text
        if tokens is not None:
            prompt = tokens.encode(text)
            if (length := await self.likelihoods.length()) is not None:
                if most >= length:
                    return Sample(
                        key=key,
                        asked=question.asked,
                        problem=f"max_gen_toks={most}: the model takes {length} tokens together with the prompt",
                    )
                prompt = prompt[most - length :]  # its end, as lm-evaluation-harness
        if body["temperature"] > 0:
            body["seed"] = digest(self.seed, "evaluate", *key, 0) >> 33  # some servers take no more than 31 bits
        answer = await client.ask(Request(body={**body, "prompt": prompt}, path="completions"))
        if answer.status in REFUSED:
            raise Failed(answer.problem)
        ended = answer.answer or ""
        for stop in body.get("stop", ()):
            ended = ended.partition(stop)[0]
        return Sample(
            key=key,
            asked=question.asked,
            seed=answer.seed,
            answer=ended,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=answer.seconds,
            problem=answer.problem,
        )


def _shown(kind: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked by requests of one document, for people, and the fields of the request."""
    if kind == "loglikelihood":
        if len({each[0] for each in arguments}) == 1:
            return {"context": arguments[0][0], "choices": [each[1] for each in arguments]}, {}
        return {"pairs": [list(each) for each in arguments]}, {}
    if kind == "loglikelihood_rolling":
        return {"text": arguments[0][0]}, {}
    from lm_eval.models.utils import normalize_gen_kwargs

    text, given = arguments[0]
    settings = dict(normalize_gen_kwargs(given, _MOST_TOKENS))
    until = settings.pop("until", None) or []
    stop = [until] if isinstance(until, str) else [each for each in until if each]
    body = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    if unknown := sorted(set(settings) - {*_SAMPLING, "do_sample", "max_gen_toks"}):
        raise Failed(f"generation_kwargs: {', '.join(unknown)}: an endpoint has no such setting")
    body |= {"max_tokens": settings["max_gen_toks"], **({"stop": stop} if stop else {})}
    return {"text": text}, body


def _tasks(benchmark: Benchmark, manager: Any, folder: Path, trust_code: bool) -> list[Any]:
    """The tasks of a benchmark, loaded.

    Raises:
        Failed: there is none by its name, its files want to run code, or its data is not here.
    """
    name = str(benchmark.task)
    if name not in manager.task_index:
        known = nearest(name, manager.all_tasks) if manager.all_tasks else "there is none"
        raise Failed(f"not in evaluate.harness_tasks={folder}: {known}")
    if not trust_code:
        for path in _files(name, manager.task_index):
            if why := _code(path):
                raise Failed(f"{path}: {why}: trust_remote_code=true allows it")
    try:
        found = list(manager.load([name])["tasks"].values())
    except (OSError, ConnectionError) as error:
        raise Failed(f"its data is not here, and nothing is downloaded ({error})") from None
    for task in found:
        if getattr(task, "MULTIMODAL", False):
            raise Failed("wants images or sounds")
        if getattr(task, "UNSAFE_CODE", False) and not trust_code:
            raise Failed("runs the model's answers as code: trust_remote_code=true allows it")
    if not found:
        raise Failed("has no tasks")
    return found


def _files(name: str, index: Mapping[str, Any], seen: set[str] | None = None) -> Iterator[Path]:
    """Files of a task, or of those of a group or tag, without the files that they include."""
    seen = set() if seen is None else seen
    if name in seen or name not in index:
        return
    seen.add(name)
    entry = index[name]
    if entry.yaml_path is not None:
        yield Path(entry.yaml_path)
    named = sorted(entry.tags) if entry.kind.name == "TAG" else []
    waiting = [entry.cfg or {}] if entry.kind.name == "GROUP" else []
    while waiting:
        members = waiting.pop().get("task")
        for member in members if isinstance(members, list) else []:
            if isinstance(member, dict):
                named += [str(member[key]) for key in ("task", "group") if isinstance(member.get(key), str)]
                waiting.append(member)
            else:
                named.append(str(member))
    for each in named:
        yield from _files(each, index, seen)


class _Marked(yaml.SafeLoader):
    """Reads YAML with `!function` as a mark."""


class _Function(str):
    """Name of a function."""


_Marked.add_constructor("!function", lambda loader, node: _Function(node.value))


def _code(path: Path, seen: frozenset[Path] = frozenset()) -> str:
    """Why a task file may run code, load unsafe files or download; "" if it does not."""
    path = path.resolve()
    if path in seen:
        return ""
    with open(path, encoding="utf-8") as file:
        found = yaml.load(file, _Marked)
    included = found.get("include") or [] if isinstance(found, dict) else []
    for each in [included] if isinstance(included, str) else included:
        if why := _code(path.parent / each, seen | {path}):
            return f"includes {each}: {why}"
    return _runs(found)


def _runs(found: Any) -> str:
    from lm_eval.api.registry import METRIC_REGISTRY

    if isinstance(found, _Function):
        return f"names the function {found}"
    if isinstance(found, list):
        return next(filter(None, map(_runs, found)), "")
    if not isinstance(found, dict):
        return ""
    for key in ("class", "use_prompt", "unsafe_code", "hf_evaluate"):
        if found.get(key):
            return f"its key {key} runs code"
    if "metric" in found and str(found["metric"]) not in METRIC_REGISTRY:
        return f"metric {found['metric']} is no metric of lm-evaluation-harness, and would be run from elsewhere"
    if found.get("dataset_path") == "pandas":
        return "dataset_path: pandas reads pickles, which run code"
    files = found.get("dataset_kwargs") or {}
    if "://" in str(found.get("dataset_path")) or "://" in str(files):
        return "its data would be downloaded"
    return next(filter(None, map(_runs, found.values())), "")


def _evaluate(
    benchmark: Benchmark,
    tasks: Sequence[Any],
    model: EndpointModel,
    store: Store,
    ran: Ran,
    *,
    limit: Count | None,
    seed: int,
    chat: bool,
) -> None:
    """Asks and scores all tasks of a benchmark."""
    kinds = {str(task.OUTPUT_TYPE) for task in tasks}
    kind: Kind = _KINDS.get(kinds.pop(), "choice") if len(kinds) == 1 else "generate"
    first = _headline(benchmark, tasks[0])
    samples = max(int(task.config.repeats or 1) for task in tasks)
    better = bool(tasks[0].higher_is_better().get(first, True))
    known = replace(
        benchmark,
        kind=kind,  # how the numbers are told and summed
        samples=samples,
        settings={**benchmark.settings, "headline": first},
        higher_is_better=better,
    )
    model.benchmark = known
    scores, questions, verifiers = [], [], []
    metrics: dict[str, float] = {}
    for task in tasks:
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(
            limit=limit,
            rank=0,
            world_size=1,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=model.apply_chat_template if chat else None,
        )
        verifiers.append(digest_of(lm_eval.__version__, _described(task)))
    verifier = digest_of("harness", first, verifiers)
    for task in tasks:
        responses = _responses(task, model)
        found, values = _scores(task, model, responses, known, verifier)
        scores += found
        documents = {id(model.asked[id(each)][0]): model.asked[id(each)][0] for each in _firsts(task)}
        questions += list(documents.values())
        aggregated = task.aggregation()
        for metric, column in values.items():
            value = aggregated[metric.partition(",")[0]](column)
            metrics[f"{task.config.task}/{metric}" if len(tasks) > 1 else metric] = float(value)
    kept = store.scores()
    store.add_scores(each for each in scores if kept.get((each.key, each.asked, each.digest)) != each)
    ran.plans.append(Plan(benchmark=known, questions=questions, verifier=verifier))
    ran.metrics[benchmark.name] = metrics


def _headline(benchmark: Benchmark, task: Any) -> str:
    names = list(task.aggregation())
    wanted = benchmark.settings.get("headline")
    if wanted is not None and wanted not in names:
        raise Failed(f"headline={wanted}: expected {', '.join(names)}")
    if wanted is None and task.OUTPUT_TYPE == "loglikelihood_rolling" and _BITS in names:
        return _BITS
    return str(wanted or names[0])


def _described(task: Any) -> dict[str, Any]:
    """A task's settings; where they were read does not matter."""
    return {key: value for key, value in task.dump_config().items() if key not in ("metadata", "dataset_kwargs")}


def _responses(task: Any, model: EndpointModel) -> dict[int, list[Any]]:
    """Responses to each of a task's requests, by its id() and repeat."""
    by_type: dict[str, list[Any]] = defaultdict(list)
    for request in task.instances:
        by_type[request.request_type] += [request] * int(request.repeats or 1)
    found: dict[int, list[Any]] = defaultdict(list)
    for kind, requests in by_type.items():
        for request, response in zip(requests, getattr(model, kind)(requests), strict=True):
            found[id(request)].append(response)
    return found


def _firsts(task: Any) -> list[Any]:
    """First request of each document."""
    found: dict[int, Any] = {}
    for request in sorted(task.instances, key=lambda request: request.idx):
        found.setdefault(request.doc_id, request)
    return [found[document] for document in sorted(found)]


def _scores(
    task: Any, model: EndpointModel, responses: Mapping[int, Sequence[Any]], benchmark: Benchmark, verifier: str
) -> tuple[list[Score], dict[str, list[Any]]]:
    """Scores of all answers, and the metrics' values over documents as lm-evaluation-harness aggregates them.

    The task's first filter makes the score of each answer; the others see all answers to a document at once, as those
    that take the majority must.
    """
    first, *others = task._filters
    columns: dict[str, list[Any]] = defaultdict(list)
    shared: dict[int, dict[str, float]] = defaultdict(dict)
    for each in others:
        for document, metrics in _processed(task, each, responses).items():
            for name, value in metrics.items():
                columns[f"{name},{each.name}"].append(value)
                shared[document] |= _numbers(task, name, value, f"{name},{each.name}")
    starts, scores = {request.doc_id: request for request in _firsts(task)}, []
    for repeat in range(benchmark.samples):
        here = {name: [given[repeat]] for name, given in responses.items() if repeat < len(given)}
        for document, metrics in _processed(task, first, here).items():
            if not repeat:
                for name, value in metrics.items():
                    columns[name].append(value)
            start = starts[document]
            question, _ = model.asked[id(start)]
            more = {**shared[document]}
            for name, value in metrics.items():
                more |= _numbers(task, name, value, name)
            headline = str(benchmark.settings["headline"])
            target = task.doc_to_target(start.doc)
            filtered = start.filtered_resps[first.name]
            score = more.get(headline)
            why = "" if score == 1 or benchmark.kind == "bits" else f"expected {target!r}"[:200]
            scores.append(
                Score(
                    key=question.key(repeat),
                    asked=question.asked,
                    digest=verifier,
                    score=score,
                    reference=digest_of(target),
                    why=f"{headline} is a metric of all documents together" if score is None else why,
                    found=filtered if isinstance(filtered, str) else None,
                    more=more,
                )
            )
    return scores, columns


def _processed(task: Any, filtering: Any, responses: Mapping[int, Sequence[Any]]) -> dict[int, dict[str, Any]]:
    """Metrics of each document, after a filter."""
    requests = [request for request in task.instances if id(request) in responses]
    for request in requests:
        request.resps, request.filtered_resps = list(responses[id(request)]), {}
    filtering.apply(requests)
    by_document: dict[int, list[Any]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.idx):
        by_document[request.doc_id].append(request)
    return {
        document: task.process_results(group[0].doc, [each.filtered_resps[filtering.name] for each in group])
        for document, group in sorted(by_document.items())
    }


def _numbers(task: Any, metric: str, value: Any, name: str) -> dict[str, float]:
    """A metric of one document, where it means something by itself."""
    if metric == _BITS and isinstance(value, tuple):
        nats, size = value
        return {name: -nats / math.log(2) / max(1, size), "nats": float(nats), "bytes": float(size)}
    by_mean = getattr(task.aggregation().get(metric), "__name__", "") in ("mean", "nanmean")
    if isinstance(value, list | tuple | dict | str) or not by_mean:
        return {}
    return {name: float(value)}


@contextlib.contextmanager
def _offline(trust_code: bool) -> Iterator[None]:
    """Nothing is downloaded, templates run in a sandbox, and no bars are drawn, meanwhile."""
    import datasets
    import huggingface_hub
    import lm_eval.api.task
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters |= utils.env.filters
    quiet = logging.getLogger("lm_eval")
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    places: list[tuple[Any, str, Any]] = [
        (datasets.config, "HF_HUB_OFFLINE", True),
        (huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        (lm_eval.api.task, "tqdm", functools.partial(lm_eval.api.task.tqdm, disable=True)),
        *([] if trust_code else [(utils, "env", sandbox)]),
    ]
    before = [getattr(place, name, None) for place, name, _ in places]
    bars = not datasets.are_progress_bars_disabled()
    environment, level = {name: os.environ.get(name) for name in names}, quiet.level
    try:
        os.environ |= dict.fromkeys(names, "1")
        quiet.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        for place, name, value in places:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(places, before, strict=True):
            setattr(place, name, value)
        quiet.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
        for name, value in environment.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
