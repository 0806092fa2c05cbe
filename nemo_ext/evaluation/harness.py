"""Tasks of lm-evaluation-harness, run through an endpoint, with every answer in the store.

lm-evaluation-harness makes the requests and scores the answers; this package sends, retries and stores the requests.
With `repeats`, every answer has its own seed and is scored separately; lm-evaluation-harness scores only the first.
Task files are treated as data: nothing is downloaded, and their Python code runs only if it is trusted.
"""

import asyncio
import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval.api.task
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.model import LM
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from nemo_ext.endpoint.client import Answer, EndpointGone
from nemo_ext.evaluation.ask import Asking, Question
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark, Kind
from nemo_ext.evaluation.likelihood import Likelihoods
from nemo_ext.evaluation.problems import Problem
from nemo_ext.evaluation.results import Plan
from nemo_ext.evaluation.store import Key, Sample, Score, Store, digest_of
from nemo_ext.job.settings import Count, nearest

_MOST_TOKENS = 256
"""Default maximum tokens per answer, as in lm-evaluation-harness."""
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
_KINDS: dict[str, Kind] = {"loglikelihood_rolling": "bits", "generate_until": "generate"}
_BITS = "bits_per_byte"


class Failed(Exception):
    """Raised if a task cannot be evaluated; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Outcome of running tasks.

    Attributes:
        plans: questions and scoring of the evaluated benchmarks, for `results`.
        metrics: mapping from benchmark to its metrics, with values over all documents, aggregated by
            lm-evaluation-harness; metrics are named `TASK/METRIC` if the benchmark has several tasks.
        missing: mapping from each benchmark that could not be evaluated to the reason.
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
    trust_code: bool = False,
) -> Ran:
    """Evaluate tasks, groups or tags, named by `Benchmark.task`; answers in the store are not requested again.

    Args:
        benchmarks: benchmarks to evaluate; their setting `headline` names the headline metric (by default bits per
            byte for rolling log-likelihoods if available, otherwise the task's first metric).
        folder: folder with the task files.
        likelihoods: measures log-likelihoods at the endpoint; answers are requested through its client.
        store: store of the answers and scores.
        limit: maximum number of documents per task, taken from the beginning; None for all.
        seed: seed for the answers and the choice of few-shot examples.
        trust_code: whether Python code named in task files may run.

    Raises:
        ValueError: the folder does not exist.
        EndpointGone: the endpoint has not responded for longer than the client's patience.
    """
    if not folder.is_dir():
        raise ValueError(f"evaluate.harness_tasks={folder}: no such folder; set it to a folder of task files")
    stored = {(sample.key, sample.asked): sample for sample in store.answers() if not sample.problem}

    def seen(sample: Sample, _: bool) -> None:
        stored[sample.key, sample.asked] = sample

    asking = _Asking(client=likelihoods.client, likelihoods=likelihoods, store=store, scorers={}, seed=seed, seen=seen)
    loop, ran = asyncio.get_running_loop(), Ran()

    def ask(work: Iterable[tuple[Question, int, None]]) -> None:
        asyncio.run_coroutine_threadsafe(asking.run(work), loop).result()

    def work() -> None:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        for benchmark in benchmarks:
            try:
                tasks = _tasks(str(benchmark.task), manager, folder, seed)
                model = EndpointModel(benchmark, ask, stored, several=len(tasks) > 1)
                _evaluate(model, tasks, store, ran, limit=limit, confirm_run_unsafe_code=trust_code)
            except EndpointGone:
                raise
            except Exception as error:  # code of tasks may raise anything
                reason = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
                ran.missing[benchmark.name] = f"task {benchmark.task}: {' '.join(reason.split())[:300]}"

    with _offline(trust_code):
        await asyncio.to_thread(work)
    return ran


class _Asking(Asking):
    """Sender of requests that truncates overlong prompts from the left, as lm-evaluation-harness does."""

    async def _request(self, question: Question, number: int) -> Sample:
        return await (super()._request(question, number) if question.body else self._measure(question, number))

    async def _answer(self, question: Question, number: int, turn: int, messages: Any) -> Answer:
        tokens, length = self.likelihoods.tokens, await self.likelihoods.length()
        if tokens is not None and length is not None:
            if (most := question.body["max_tokens"]) >= length:
                raise Failed(
                    f"max_gen_toks={most} leaves no room for a prompt in the model's {length} tokens; lower it"
                )
            question = replace(question, shown={"text": tokens.encode(question.shown["text"])[most - length :]})
        return await super()._answer(question, number, turn, messages)


class EndpointModel(LM):
    """Model of lm-evaluation-harness that sends requests to an endpoint.

    Args:
        ask: function that sends questions, each with a sample number, and returns once all answers are in `stored`.
        stored: mapping from (key, request hash) to answer.
        several: whether the benchmark has several tasks.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        ask: Callable[[Iterable[tuple[Question, int, None]]], None],
        stored: Mapping[tuple[Key, str], Sample],
        *,
        several: bool = False,
    ) -> None:
        super().__init__()
        self.benchmark, self.ask, self.stored, self.several = benchmark, ask, stored, several
        self.first = 0
        """Sample number of the answer to the first repeat of each request."""
        self.questions: dict[tuple[str, int], Question] = {}
        """Mapping from (task, document) to the first question about the document."""

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether it is the greedy one."""
        return self._answers(requests, lambda sample, place: (sample.logprobs[place], sample.greedy[place]))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood of each whole text in nats."""
        return self._answers(requests, lambda sample, place: sample.logprobs[place])

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the generated answers, in the order of the requests."""
        return self._answers(requests, lambda sample, place: sample.answer)

    def _answers(self, requests: Sequence[Any], value: Callable[[Sample, int], Any]) -> list[Any]:
        """Request all answers that are not stored, and return one value per request, in order.

        Args:
            requests: requests of lm-evaluation-harness; one with repeats occurs once per repeat.
            value: function that extracts a request's value from a sample, given the request's index in that sample.
        """
        numbers: Counter[int] = Counter()
        groups: dict[tuple[str, int, int, int], list[Any]] = defaultdict(list)
        order = []
        for request in requests:  # one question per document, or per request where texts are generated
            alone = request.idx if request.request_type == "generate_until" else 0
            name = request.task_name, request.doc_id, alone, self.first + numbers[id(request)]
            numbers[id(request)] += 1
            order.append((name, len(groups[name])))
            groups[name].append(request)
        questions = {name: self._question(*name[:3], group) for name, group in groups.items()}
        keys = {name: (question.key(name[3]), question.asked) for name, question in questions.items()}
        self.ask((questions[name], name[3], None) for name, key in keys.items() if key not in self.stored)
        if problems := [self.stored[key].problem for key in keys.values() if self.stored[key].problem]:
            raise Failed(
                f"{len(problems)} of {len(keys)} requests failed ({problems[0]}); rerun the same command to retry them"
            )
        return [value(self.stored[keys[name]], place) for name, place in order]

    def _question(self, task: str, document: int, alone: int, group: Sequence[Any]) -> Question:
        kind, texts = str(group[0].request_type), [request.args for request in group]
        choices = tuple(choice for _, choice in texts) if kind == "loglikelihood" else ()
        name = (f"{task}/{document}" if self.several else str(document)) + (f".{alone}" if alone else "")
        domain, prompts = task if self.several else "", {kind: str(texts[0][0])}
        shown: dict[str, Any] = {"text": texts[0][0]}
        if choices:
            shown = {"context": texts[0][0], "choices": list(choices)}
            if len({context for context, _ in texts}) > 1:
                shown = {"pairs": [list(pair) for pair in texts]}
        question = Question(
            benchmark=self.benchmark,
            problem=Problem(id=name, domain=domain, prompts=prompts, reference={}, choices=choices),
            prompt=kind,
            mode=PLAIN,
            shown=shown,
            body=_body(texts[0][1]) if kind == "generate_until" else {},
        )
        self.questions.setdefault((task, document), question)
        return question


def _body(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a task's generation_kwargs to request fields."""
    settings = dict(normalize_gen_kwargs(generation_kwargs, _MOST_TOKENS))
    until = settings.pop("until", None) or []
    body = {"max_tokens": settings.pop("max_gen_toks"), "stop": [until] if isinstance(until, str) else list(until)}
    if unknown := sorted(set(settings) - _SAMPLING - {"do_sample"}):
        raise Failed(f"generation_kwargs has keys that endpoints do not support: {', '.join(unknown)}; remove them")
    body |= {name: settings[name] for name in sorted(_SAMPLING & set(settings))}
    return {name: value for name, value in body.items() if value not in (None, [])}


def _tasks(name: str, manager: TaskManager, folder: Path, seed: int) -> dict[str, Any]:
    if name not in manager.task_index:
        known = nearest(name, manager.all_tasks) if manager.all_tasks else "the folder has no tasks"
        raise Failed(f"task {name} is not in evaluate.harness_tasks={folder}: {known}")
    try:
        tasks = manager.load([name])["tasks"]
    except (OSError, ConnectionError) as error:
        raise Failed(
            f"the data of task {name} is not on this machine, and nothing is downloaded; download it first ({error})"
        ) from None
    if not tasks:
        raise Failed(f"{name} is a group or tag without tasks; add tasks to it")
    for task in tasks.values():
        task.set_fewshot_seed(seed=seed)
    return dict(tasks)


def _evaluate(model: EndpointModel, tasks: Mapping[str, Any], store: Store, ran: Ran, **settings: Any) -> None:
    """Request and score the answers to all tasks of a benchmark; add the outcome to `ran`.

    `settings` are further arguments of lm-evaluation-harness's `evaluate`.
    """
    first, kinds = next(iter(tasks.values())), {str(task.OUTPUT_TYPE) for task in tasks.values()}
    known = list(first.aggregation())
    usual = _BITS if first.OUTPUT_TYPE == "loglikelihood_rolling" and _BITS in known else known[0]
    headline = str(model.benchmark.settings.get("headline") or usual)
    if headline not in known:
        raise Failed(f"settings.headline={headline}: expected one of {', '.join(known)}")
    repeats = {name: int(task.config.repeats or 1) for name, task in tasks.items()}
    model.benchmark = replace(
        model.benchmark,
        kind=_KINDS.get(kinds.pop(), "choice") if len(kinds) == 1 else "generate",  # decides how numbers are averaged
        samples=max(repeats.values()),
        settings={**model.benchmark.settings, "headline": headline},
        higher_is_better=bool(first.higher_is_better().get(headline, True)),
    )
    described = [
        {key: value for key, value in task.dump_config().items() if key not in ("metadata", "dataset_kwargs")}
        for task in tasks.values()
    ]
    verifier = digest_of("harness", headline, [[lm_eval.__version__, each] for each in described])
    whole = evaluate(model, {"tasks": tasks}, bootstrap_iters=0, **settings)
    alone = [whole["samples"]]
    for task in tasks.values():
        task.set_config(key="repeats", value=1)
    for number in range(model.benchmark.samples if model.benchmark.samples > 1 else 0):
        model.first = number  # scores each answer separately; all of them are stored by now
        chosen = {name: task for name, task in tasks.items() if repeats[name] > number}
        alone[number:] = [evaluate(model, {"tasks": chosen}, bootstrap_iters=0, **settings)["samples"]]
    shared: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    metrics = ran.metrics[model.benchmark.name] = {}
    for name, rows in whole["samples"].items():
        first_filter = rows[0]["filter"]
        for key, value in whole["results"][name].items():
            if "," in key and "_stderr," not in key:
                metrics[(f"{name}/" if model.several else "") + key.removesuffix(f",{first_filter}")] = float(value)
        for row in rows:
            if row["filter"] != first_filter:
                shared[name, row["doc_id"]] |= _numbers(tasks[name], row, f",{row['filter']}")
    stored = store.scores()
    for number, samples in enumerate(alone):
        for name, row in ((name, row) for name, rows in samples.items() for row in rows):
            if row["filter"] != samples[name][0]["filter"]:
                continue
            question, found = model.questions[name, row["doc_id"]], row["filtered_resps"][0]
            more = {**shared[name, row["doc_id"]], **_numbers(tasks[name], row)}
            why = "" if more.get(headline) == 1 or headline == _BITS else f"expected {row['target']!r}"[:200]
            score = Score(
                key=question.key(number),
                asked=question.asked,
                digest=verifier,
                score=more.get(headline),
                reference=digest_of(row["target"]),
                why=why if headline in more else f"{headline} is defined only over all documents together",
                found=found if isinstance(found, str) else None,
                more=more,
            )
            if stored.get((score.key, score.asked, score.digest)) != score:
                store.add_scores([score])
    ran.plans.append(Plan(benchmark=model.benchmark, questions=list(model.questions.values()), verifier=verifier))


def _numbers(task: Any, row: Mapping[str, Any], ending: str = "") -> dict[str, float]:
    """Return the metrics of a document that are averaged over documents, with `ending` appended to their names.

    `row` is the document's sample as logged by lm-evaluation-harness. For bits per byte, `nats`
    and `bytes` are returned too.
    """
    numbers: dict[str, float] = {}
    for metric in row["metrics"]:
        value, how = row[metric], getattr(task.aggregation().get(metric), "__name__", "")
        if metric == _BITS and isinstance(value, tuple):
            nats, size = value
            numbers |= {metric + ending: -nats / math.log(2) / max(1, size), "nats": float(nats), "bytes": float(size)}
        elif how in ("mean", "nanmean") and not isinstance(value, list | tuple | dict | str):
            numbers[metric + ending] = float(value)
    return numbers


class _Function(str):
    """Name of a function to which a task file refers (`!function`)."""


def _reasons(content: Any) -> Iterator[str]:
    """Yield the reasons why a task file with this parsed content could run code, load unsafe files or download data."""
    if isinstance(content, _Function):
        yield f"it names the function {content}"
    pairs = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else ())
    for key, value in pairs:
        if key in ("class", "use_prompt", "unsafe_code", "hf_evaluate") and value:
            yield f"its key {key} runs code"
        elif key == "metric" and str(value) not in METRIC_REGISTRY:
            yield f"its metric {value} is not part of lm-evaluation-harness, and would run code from elsewhere"
        elif key == "dataset_path" and value == "pandas":
            yield "its dataset_path is pandas, which reads pickles, and these can run code"
        elif key in ("dataset_path", "dataset_kwargs") and "://" in str(value):
            yield "its data would be downloaded"
        yield from _reasons(value)


def _data(path: Path, **settings: Any) -> dict[str, Any]:
    """Load a task file with its includes; `settings` are further arguments of lm-evaluation-harness's `load_yaml`."""
    content = load_yaml(path, **settings)
    if why := next(_reasons(content), ""):
        raise Failed(f"task file {path} is rejected, as {why}; set trust_remote_code=true to allow this")
    return dict(content)


@contextlib.contextmanager
def _offline(trust_code: bool) -> Iterator[None]:
    """Disable downloads and progress bars until the block ends and, unless `trust_code`, code from task files."""
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters |= lm_eval.utils.env.filters
    changes = {
        "datasets.config.HF_HUB_OFFLINE": True,
        "huggingface_hub.constants.HF_HUB_OFFLINE": True,
        "lm_eval.api.task.tqdm": functools.partial(lm_eval.api.task.tqdm, disable=True),
    }
    if not trust_code:
        changes["lm_eval.utils.env"] = sandbox
        changes["lm_eval.tasks._yaml_loader._import_func_in_yml"] = lambda name, folder: _Function(name)
        changes["lm_eval.tasks._factory.load_yaml"] = _data
    with contextlib.ExitStack() as stack:
        for place, value in changes.items():
            stack.enter_context(patch(place, value))
        yield
