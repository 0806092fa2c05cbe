"""The `nemo-ext evaluate` job: runs benchmarks, scores the answers and reports the results (docs/evaluation.md)."""

import asyncio
import functools
import hashlib
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.endpoint.address import Address
from nemo_ext.endpoint.client import Client, EndpointGone
from nemo_ext.endpoint.failures import is_refusal
from nemo_ext.evaluation import page, problems, report
from nemo_ext.evaluation.ask import Asking, Question, questions
from nemo_ext.evaluation.benchmark import Benchmark, read_suite
from nemo_ext.evaluation.likelihood import Likelihoods
from nemo_ext.evaluation.results import Plan, results
from nemo_ext.evaluation.score import Scorer
from nemo_ext.evaluation.settings import EvaluateSettings, Settings
from nemo_ext.evaluation.store import ASKED, RESULTS, STORE, Key, Sample, Store, digest_of
from nemo_ext.job.config import FAILED
from nemo_ext.job.files import A_DAY, only_run_in, write_text
from nemo_ext.job.made_of import check_same, note, noted
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import checked, nearest, prefixed_errors
from nemo_ext.rl.environments import make
from nemo_ext.serving.meanwhile import endpoint_of
from nemo_ext.serving.model import check as check_model
from nemo_ext.serving.settings import ServingSettings

_MADE_OF = "made_of.json"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Benchmarks that are ready to run; as a context manager, it closes their scorers.

    Attributes:
        plans: questions and scoring of each benchmark.
        scorers: mapping from benchmark to scorer.
        harness: benchmarks of kind `harness`, which lm-evaluation-harness runs.
        missing: mapping from each benchmark that cannot be run to the reason.
    """

    plans: Sequence[Plan]
    scorers: Mapping[str, Scorer]
    harness: Sequence[Benchmark]
    missing: dict[str, str]

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *_: object) -> None:
        for scorer in self.scorers.values():
            scorer.close()


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext evaluate`; the same command resumes it.

    Raises:
        ValueError: a setting is invalid, no benchmark can be run, or the store belongs to another model.
        OSError: a file cannot be written.
    """
    settings = read(config)
    print(report.summary(asked(config, settings, chosen(settings.evaluate))))
    run_dir = Path(settings.run_dir).expanduser()
    notice(f"report: {run_dir / report.REPORT}, {run_dir / page.PAGE}")


def asked(config: Mapping[str, Any], settings: Settings, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """Run benchmarks with a job's config and return the content of results.json; exit if the endpoint does not respond.

    Raises:
        ValueError: no benchmark can be run, or the store belongs to another model.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
    share, run_dir = _share(config), Path(settings.run_dir).expanduser()
    evaluate = settings.evaluate
    try:
        with (
            prepare(evaluate, Path(evaluate.data_root).expanduser(), benchmarks) as prepared,
            only_run_in(run_dir) if share is None else nullcontext(),
            endpoint_of(config, run_dir / OWN) as (place, model, folder),
        ):
            tokenizer = folder if settings.files_from is None else Path(settings.files_from).expanduser()
            return asyncio.run(
                _evaluate(
                    evaluate,
                    prepared,
                    lambda: Client(place, evaluate.client, model=model, key_variable=settings.key_variable),
                    run_dir,
                    tokenizer=tokenizer,
                    share=share,
                    meanwhile=settings.endpoint is None,
                    trust_code=settings.trust_remote_code,
                )
            )
    except EndpointGone as error:
        print(f"error: {error}; the same command resumes", file=sys.stderr)
        sys.exit(FAILED)


def check(config: Mapping[str, Any]) -> None:
    """Validate a config as `nemo-ext evaluate` does before its first request.

    Raises:
        ValueError: a setting is invalid, or no benchmark can be run.
    """
    settings = read(config).evaluate
    with prepare(settings, Path(settings.data_root).expanduser(), chosen(settings)):
        pass


def evaluate(
    settings: EvaluateSettings, address: Address, run_dir: Path, *, tokenizer: Path | None = None, pages: bool = True
) -> dict[str, Any]:
    """Evaluate the model behind an endpoint and return the content of results.json.

    Args:
        tokenizer: folder of the model's tokenizer; None if unknown.
        pages: whether to write report.md and report.html too.

    Raises:
        ValueError: a setting is invalid, no benchmark can be run, or the store belongs to another model.
        EndpointGone: the endpoint has not responded for longer than the client's patience.
    """
    with prepare(settings, Path(settings.data_root).expanduser(), chosen(settings)) as prepared:
        client = functools.partial(Client, address, settings.client)
        return asyncio.run(_evaluate(settings, prepared, client, run_dir, tokenizer=tokenizer, pages=pages))


def chosen(settings: EvaluateSettings) -> list[Benchmark]:
    """Return the benchmarks of the suites and tasks in the settings, with `samples` from the settings applied.

    Raises:
        ValueError: a suite, benchmark or mode is unknown, or two suites define one benchmark differently.
    """
    known: dict[str, Benchmark] = {}
    for suite in settings.suite:
        for benchmark in read_suite(suite)[1]:
            if known.setdefault(benchmark.name, benchmark) != benchmark:
                raise ValueError(
                    f"suite={suite}: benchmark {benchmark.name} differs from the one in an earlier suite; rename one "
                    "of them"
                )
    for name in settings.benchmarks:
        if name not in known:
            raise ValueError(f"evaluate.benchmarks: unknown name {name!r}: {nearest(name, list(known))}")
    selected = [entry for entry in known.values() if not settings.benchmarks or entry.name in settings.benchmarks]
    modes = {mode for benchmark in selected for mode in benchmark.modes}
    for mode in settings.modes:
        if mode not in modes:
            raise ValueError(f"evaluate.modes: unknown mode {mode!r}: {nearest(mode, sorted(modes))}")
    if settings.tasks and settings.harness_tasks is None:
        raise ValueError("evaluate.tasks requires evaluate.harness_tasks: set it to the folder with the task files")
    selected += [Benchmark(name=name, kind="harness", task=name) for name in settings.tasks]
    if (samples := settings.samples) is not None:
        selected = [
            replace(entry, samples=samples, k=None if entry.k is None else min(entry.k, samples))
            if entry.kind == "generate"
            else entry
            for entry in selected
        ]
    return selected


def prepare(settings: EvaluateSettings, data_root: Path, benchmarks: Sequence[Benchmark]) -> Prepared:
    """Read the problems of benchmarks and create their scorers; benchmarks that cannot be run are reported and skipped.

    Raises:
        ValueError: no benchmark can be run.
    """
    if isinstance(settings.python, Mapping):
        with prefixed_errors("evaluate.python"):
            make("python_tool", settings.python)
    plans, scorers, harness, missing = [], {}, [], {}
    for benchmark in benchmarks:
        if benchmark.kind == "harness":
            if settings.harness_tasks is None:
                missing[benchmark.name] = "requires evaluate.harness_tasks, the folder with its task files"
            elif find_spec("lm_eval") is None:
                missing[benchmark.name] = "requires lm-evaluation-harness: pip install 'nemo_ext[harness]'"
            else:
                harness.append(benchmark)
            continue
        try:
            selected = problems.problems(benchmark, data_root, seed=settings.seed, limit=settings.limit)
            benchmark, selected = problems.with_python(benchmark, selected, settings.python)
            environment = (selected[0].environment or None) if benchmark.kind == "generate" else None
            scorer = Scorer(benchmark, environment, settings.judge)
            verifier = None if scorer.episodes is None else scorer.episodes.environment
            problems.check(benchmark, verifier, selected)
            if verifier is not None and verifier.tools:
                selected = [replace(problem, tools=problem.tools or verifier.tools) for problem in selected]
        except ValueError as error:
            missing[benchmark.name] = str(error)
            continue
        modes = [mode for mode in settings.modes if mode in benchmark.modes]
        plans.append(
            Plan(
                benchmark=benchmark,
                questions=list(questions(benchmark, selected, modes, settings.client.omit)),
                verifier=scorer.digest,
            )
        )
        scorers[benchmark.name] = scorer
    skipped = [why if f"benchmark {name}" in why else f"benchmark {name}: {why}" for name, why in missing.items()]
    for why in skipped:
        notice(f"skipped: {why}")
    if not plans and not harness:
        raise ValueError(
            f"no benchmark can be run: {skipped[0] if skipped else 'the suite is empty; set suite or evaluate.tasks'}"
        )
    return Prepared(plans=plans, scorers=scorers, harness=harness, missing=missing)


def read(config: Mapping[str, Any]) -> Settings:
    """Read and check an evaluation's settings from a config.

    Raises:
        ValueError: a setting is invalid, or the model cannot be served.
    """
    settings = checked(Settings, config)
    if settings.endpoint is None:
        check_model(str(settings.served), ServingSettings.from_config(config), config)
    if settings.evaluate.judge is not None:
        from nemo_ext.rl.judge import JudgeSettings

        checked(JudgeSettings, settings.evaluate.judge, "judge", strict=True)
    return settings


def _share(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return this worker's index and the number of workers that share the samples; None if it takes them all."""
    serving = config["serving"]
    if serving["replica"] is None or config["endpoint"] is not None:
        return None
    return int(serving["replica"]), int(serving["replicas"])


async def _evaluate(
    settings: EvaluateSettings,
    prepared: Prepared,
    make_client: Callable[[], Client],
    run_dir: Path,
    *,
    tokenizer: Path | None,
    share: tuple[int, int] | None = None,
    meanwhile: bool = False,
    trust_code: bool = False,
    pages: bool = True,
) -> dict[str, Any]:
    with Store(run_dir / STORE) as store:
        async with make_client() as client:
            await client.check()
            _check_made_of(run_dir, client.address, settings.seed)
            for scorer in prepared.scorers.values():
                await _reach(scorer)
            work, total, finished = _work(prepared.plans, store, settings, share)
            likelihoods = Likelihoods(client, tokenizer)
            with _progress(total, finished) as seen:
                asking = Asking(
                    client=client,
                    likelihoods=likelihoods,
                    store=store,
                    scorers=prepared.scorers,
                    seed=settings.seed,
                    count_reasoning=_counter(tokenizer),
                    seen=seen,
                )
                await asking.run(work)
            plans, missing, metrics = [*prepared.plans], dict(prepared.missing), dict[str, dict[str, float]]()
            if prepared.harness and (share is None or share[0] == 0):
                from nemo_ext.evaluation import harness

                ran = await harness.run(
                    prepared.harness,
                    Path(str(settings.harness_tasks)).expanduser(),
                    likelihoods,
                    store,
                    limit=settings.limit,
                    seed=settings.seed,
                    trust_code=trust_code,
                )
                plans, metrics = [*plans, *ran.plans], ran.metrics
                for name, why in ran.missing.items():
                    notice(f"skipped: benchmark {name}: {why}")
                missing |= ran.missing
            address = client.address
        with only_run_in(run_dir / OWN, wait=A_DAY):
            content = {
                "model": address.model,
                "endpoint": None if meanwhile else address.url,
                "digest": address.digest,
                "suite": list(settings.suite),
                "seed": settings.seed,
                "limit": settings.limit,
                "nemo_ext": __version__,
                **results(store, plans, draws=settings.draws, seed=settings.seed),
                "missing": missing,
            }
            for name, aggregated in metrics.items():  # aggregated by lm-evaluation-harness
                if name in content["benchmarks"]:  # else an error followed, which is reported
                    content["benchmarks"][name]["metrics"] = aggregated
            hashes: dict[tuple[str, ...], str] = {
                question.key(0)[:4]: question.asked for plan in plans for question in plan.questions
            }
            by_benchmark = {plan.benchmark.name: [question.asked for question in plan.questions] for plan in plans}
            write_text(run_dir / ASKED, json.dumps(by_benchmark) + "\n")
            write_text(run_dir / RESULTS, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            if pages:
                report.write(content, run_dir)
                page.write(content, store, run_dir, asked=hashes)
            if settings.inspect:
                from nemo_ext.evaluation import inspect_logs

                inspect_logs.write(content, store, run_dir / "inspect", asked=hashes)
    return content


async def _reach(scorer: Scorer) -> None:
    """Notify the user if a judge cannot be reached; answers are requested anyway, and scored in a later run."""
    try:
        await scorer.reach()
    except ValueError as error:
        notice(
            f"benchmark {scorer.benchmark.name} cannot be scored now ({error}); its answers are kept: run the same "
            "command later to score them"
        )


def _check_made_of(run_dir: Path, address: Address, seed: int) -> None:
    """Check that the store in the run directory belongs to this model and seed, and record them if it is new.

    Raises:
        ValueError: the store belongs to another model or seed.
    """
    record = run_dir / OWN / _MADE_OF
    made_of = {"model": address.model, "checkpoint": address.digest, "seed": seed}
    with only_run_in(run_dir / OWN, wait=A_DAY):
        begun = f"run_dir={run_dir} has answers of another model or seed"
        check_same(noted(record), made_of, begun, "choose another run_dir")
        note(record, made_of)


def _work(
    plans: Sequence[Plan], store: Store, settings: EvaluateSettings, share: tuple[int, int] | None
) -> tuple[Iterator[tuple[Question, int, Sample | None]], int, int]:
    """Find the samples that this worker has yet to request or to score.

    Args:
        share: this worker's index and the number of workers; None if it takes all samples.

    Returns:
        Tuples of a question, a sample number, and the stored sample that needs a score, or None if it is to be
        requested; this worker's total number of samples; and how many of them are finished.
    """
    current = {question.key(0)[:4]: (question, plan.verifier) for plan in plans for question in plan.questions}
    scores = {name: score.reference for name, score in store.scores().items() if score.score is not None}
    settled: set[Key] = set()
    unscored: list[tuple[Question, int, Sample]] = []
    for sample in store.answers():
        question, verifier = current.get(sample.key[:4], (None, ""))
        if question is None or sample.asked != question.asked or not _mine(sample.key, share):
            continue
        if sample.problem:
            if is_refusal(sample.problem) and not settings.retry:
                settled.add(sample.key)
            continue
        settled.add(sample.key)
        reference = digest_of(question.problem.reference, question.problem.gold)
        if scores.get((sample.key, sample.asked, verifier)) != reference:
            unscored.append((question, sample.key.sample, sample))
    wanted = [
        (question, number)
        for plan in plans
        for number in range(plan.benchmark.samples)
        for question in plan.questions
        if _mine(question.key(number), share)
    ]
    remaining = [(question, number, None) for question, number in wanted if question.key(number) not in settled]

    def work() -> Iterator[tuple[Question, int, Sample | None]]:
        yield from unscored
        yield from remaining

    return work(), len(wanted), len(wanted) - len(remaining) - len(unscored)


def _mine(key: Key, share: tuple[int, int] | None) -> bool:
    if share is None:
        return True
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4]) % share[1] == share[0]


@contextmanager
def _progress(total: int, finished: int) -> Iterator[Callable[[Sample, bool], None]]:
    """Show a progress bar that begins at `finished` of `total` samples; yields a callback for `Asking.seen`."""
    failed: Counter[str] = Counter()

    def detail() -> str:
        return f"{failed.total():,} failed ({failed.most_common(1)[0][0][:60]})" if failed else ""

    with progress_of("evaluate:", total, unit="samples", detail=detail) as advance:
        advance(finished)

        def seen(sample: Sample, asked: bool) -> None:
            if sample.problem:
                failed[sample.problem] += 1
            advance(1)

        yield seen


def _counter(tokenizer: Path | None) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a string; None if there is no tokenizer.json."""
    if tokenizer is None or not (tokenizer / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
