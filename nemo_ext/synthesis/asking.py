"""The steps `ask` and `converse`: answers and conversations for rows, stored by batch jobs (`nemo_ext.generate`)."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_ext.chat.formats import thinking_mode
from nemo_ext.endpoint.client import EMBEDDINGS, Client, Request
from nemo_ext.evaluation.score import said
from nemo_ext.generate.batch import Asks, answer_all, held_part_rows, made_of
from nemo_ext.generate.output import Output
from nemo_ext.generate.prompts import without_nulls
from nemo_ext.generate.rows import Index, Rows
from nemo_ext.generate.settings import BATCH, GenerateSettings
from nemo_ext.generate.work import try_requests
from nemo_ext.job import seeds
from nemo_ext.job.leases import Leases
from nemo_ext.job.made_of import check_same, digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.records import json_line
from nemo_ext.job.run_directory import OWN
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.verifiers.refusal import refuses
from nemo_ext.synthesis.canaries import canaries_of, count_canaries, with_canaries
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.conversing import Conversing, Play
from nemo_ext.synthesis.known import Known
from nemo_ext.synthesis.rows import ID, Row, read, written
from nemo_ext.synthesis.settings import Ask, Canaries, Converse, WorkSettings

_KNOWN = "known.sqlite"
_TRIED = 20
_SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "extra")
_REQUEST = {
    Ask: ("role", "prompt", "messages", "system", "tools", "thinking", "complete", "embed", "samples", *_SAMPLING),
    Converse: ("role", "environment", "settings", "thinking", "samples", "user", *_SAMPLING),
}
"""Settings that requests depend on, by step class; other settings may change without new requests."""


@dataclass(kw_only=True)
class Asking:
    """Execution of a step that sends requests.

    Attributes:
        step: settings of the step.
        context: rows, folder and counts of the step.
        clients: mapping from role to client, created for this step.
        work: the settings in the `synthesize` section.
        models: mapping from role to `model` (its name) and `checkpoint` (its digest).
    """

    step: Ask | Converse
    context: Context
    clients: Mapping[str, Client]
    work: WorkSettings
    models: Mapping[str, Mapping[str, Any]]
    _episodes: dict[str, Episodes] = field(default_factory=dict)
    _unreadable: ValueError | None = None
    _readable: int = 0

    def prepare(self, identity: str) -> Path | None:
        """Write the rows that need requests, including canaries, to a file, unless it exists.

        Each set of rows has its own file and its own folder of answers, so that no answers are lost when rows change;
        answers to identical requests are reused (`Known`).

        Args:
            identity: digest of everything that the rows depend on.

        Returns:
            Path of the file; None if no row needs a request.

        Raises:
            ValueError: answers to earlier rows were requested with different settings.
        """
        record, new = self.context.folder / OWN / "asked.json", self.context.folder / OWN / "asked.new"
        if (existing := noted(record)) is not None:
            file = self.context.folder / existing["file"]
            if existing["identity"] == identity and file.exists():
                return file if existing["rows"] else None
        number = 0
        with written(new) as write:
            for row, asked, _ in with_canaries(self.context, self.canaries, self.step.when):
                if asked and not self._problem(row):
                    write({"key": row[ID], "row": json_line(row).decode()})
                    number += 1
        with open(new, "rb") as content:
            name = digest([hashlib.file_digest(content, "sha256").hexdigest(), self.work.part_rows])[:12]
        file = self.context.folder / f"asked-{name}.jsonl"
        self._keep_answers(self._folder(file))
        new.replace(file)
        note(record, {"identity": identity, "file": file.name, "rows": number})
        return file if number else None

    def _folder(self, asked: Path) -> Path:
        """Return the folder with the answers to the rows in a file."""
        return asked.with_name(f"answers-{asked.stem.removeprefix('asked-')}")

    def _keep_answers(self, folder: Path) -> None:
        """Collect answers in the step's other folders in the `Known` file of `folder`, before its first request.

        Raises:
            ValueError: another folder's answers were requested with different settings.
        """
        others = []
        for asked in sorted(self.context.folder.glob("asked-*.jsonl")):
            other = self._folder(asked)
            before = made_of(other)
            if before is None or other == folder:
                continue
            begun = f"steps.{self.context.name}: the answers in {other} were requested with different settings"
            check_same(before, {**before, **self._made_of()}, begun, self._otherwise())
            others.append((asked, other))
        if others and made_of(folder) is None:
            (folder / OWN).mkdir(parents=True, exist_ok=True)
            number = Known(folder / OWN / _KNOWN).write(answer for pair in others for answer in self._stored(*pair))
            notice(f"steps.{self.context.name}: its input rows changed; {number:,} answers are kept for unchanged rows")

    def _stored(self, asked: Path, folder: Path) -> Iterator[tuple[Request, Mapping[str, Any]]]:
        """Yield the answers in `folder`, each with its request, which is rebuilt from the rows in the file `asked`."""
        rows = Rows.from_paths((str(asked),), "key")
        leases = Leases(folder / OWN / "leases", self.work.lease)
        output = Output(folder=folder, format="parquet", schema=None, names={}, leases=leases)
        ranges = rows.index(held_part_rows(folder)).ranges
        output.set_aside_damaged(ranges)
        for range_ in ranges:
            by_key = {str(row["key"]): row for row in rows.read(range_)}
            for key, sample, answer in output.kept(range_, list(by_key)):
                yield self.request(by_key[key], sample), answer

    def _otherwise(self) -> str:
        return f"restore those settings, choose another output, or remove {self.context.folder} to start over"

    def _made_of(self) -> dict[str, Any]:
        """Return the settings that, together with the rows, determine the answers."""
        settings = {name: getattr(self.step, name) for name in _REQUEST[type(self.step)]}
        models = {role: self.models[role] for role in self.step.roles()}
        as_json = json.loads(json.dumps(settings, default=asdict))
        return {self.context.name: as_json, "seed": self.context.seed, "models": models}

    @property
    def canaries(self) -> Canaries | None:
        """The step's canaries; None if there are none."""
        return canaries_of(self.step, self.work) if isinstance(self.step, Ask) else None

    async def ask(self, asked: Path) -> tuple[Output, Index]:
        """Request answers to all rows of a file; return the finished output and its index (see `answer_all`)."""
        settings = GenerateSettings(key="key", **{name: getattr(self.work, name) for name in BATCH})
        rows, folder = Rows.from_paths((str(asked),), "key"), self._folder(asked)

        def asks(index: Index) -> Asks:
            try_requests(self, rows.read(index.ranges[0])[:_TRIED])
            return Asks(prompts=self, made_of=self._made_of(), known=Known(folder / OWN / _KNOWN).reader())

        client = self.clients[self.step.role]
        async with AsyncExitStack() as stack:
            if isinstance(self.step, Converse):
                user = None
                if self.step.user is not None:
                    user = await stack.enter_async_context(self.clients[self.step.user.role])
                    await user.check()
                client = Conversing(client, self.step, self.context, self.episodes, user)
            try:
                return await answer_all(
                    client,
                    rows,
                    asks,
                    folder,
                    samples=self.step.samples or 1,
                    settings=settings,
                    label=self.context.name,
                    otherwise=self._otherwise(),
                )
            finally:
                for episodes in self._episodes.values():
                    episodes.shutdown()

    def request(self, row: Mapping[str, Any], sample: int) -> Request:
        """Build the request for one sample of a row (see `Requests`)."""
        key, columns = str(row["key"]), read(row["row"])
        names = (self.context.seed, "synthesize", self.context.name, key, sample)
        seed = seeds.digest(*names) >> 33  # some servers accept at most 31 bits
        body = self.step.body() | {"seed": seed}
        if self.step.thinking is not None:
            value = self.context.value("thinking", self.step.thinking, self.context.names(columns))
            mode = thinking_mode(value, f"steps.{self.context.name}.thinking: row {key}")
            if mode is not None:
                arguments = body.get("chat_template_kwargs") or {}
                body["chat_template_kwargs"] = {**arguments, "enable_thinking": mode}
        if isinstance(self.step, Converse):
            task = self._task(columns)
            self.episodes(task.environment).reference(task)  # raises ValueError if the reference is invalid
            return Play(key=key, sample=sample, body=body, task=task, row=columns)
        prompt, tools = self.prompt_of(columns), None
        if self.step.tools is not None:
            tools = self.context.value("tools", self.step.tools, self.context.names(columns))
        if self.step.complete or self.step.embed:
            if not isinstance(prompt, str):
                named = "embed" if self.step.embed else "complete"
                raise ValueError(
                    f"steps.{self.context.name}: row {key}: {named}=true requires a prompt as a string, not messages"
                )
            if self.step.embed:
                return Request(key=key, sample=sample, path=EMBEDDINGS, body={**self.step.extra, "input": prompt})
            return Request(key=key, sample=sample, path="completions", body=body | {"prompt": prompt})
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        more = {"tools": tools} if tools else {}
        return Request(key=key, sample=sample, body=body | more | {"messages": messages})

    def prompt_of(self, row: Row) -> Any:
        """Return the prompt for a row, with the system message: a list of messages, or a string.

        Raises:
            ValueError: a template or expression fails, or the prompt is neither a string nor messages.
        """
        assert isinstance(self.step, Ask)
        names = self.context.names(row)
        if self.step.prompt is not None:
            prompt: Any = self.context.text("prompt", self.step.prompt, names)
        else:
            prompt = self.context.value("messages", str(self.step.messages), names)
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt)
        ):
            raise ValueError(
                f"steps.{self.context.name}.messages: row {row[ID]}: expected a string or a list of messages, not "
                f"{str(prompt)[:60]!r}"
            )
        prompt = prompt if isinstance(prompt, str) else without_nulls(prompt)
        system = self.context.text("system", self.step.system, names) if self.step.system else ""
        if not system:
            return prompt
        if self.step.complete:
            return f"{system}\n\n{prompt}"
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0].get("role") == "system":
            system, messages = f"{system}\n\n{messages[0].get('content')}", messages[1:]
        return [{"role": "system", "content": system}, *messages]

    def _task(self, row: Row) -> Task:
        assert isinstance(self.step, Converse)
        names = ("prompt", "reference", "tools")
        environment = self.step.environment or row.get("environment")
        record = {ID: row[ID], "environment": environment, **{name: row[name] for name in names if row.get(name)}}
        if isinstance(reference := record.get("reference"), Mapping):
            record["reference"] = {key: value for key, value in reference.items() if value is not None}
        task = Task.from_record(record, f"steps.{self.context.name}: row {row[ID]}")
        return replace(task, tools=task.tools or self.episodes(task.environment).environment.tools)

    def _problem(self, row: Row) -> str:
        """Return why a conversation about a row cannot be held, such as an invalid reference; "" if it can."""
        if isinstance(self.step, Converse):
            try:
                task = self._task(row)
                self.episodes(task.environment).reference(task)
            except ValueError as error:
                return str(error)
        return ""

    def episodes(self, environment: str) -> Episodes:
        """Return the object that holds conversations in the environment with this name; the first call creates it.

        Raises:
            ValueError: the environment does not hold conversations.
        """
        assert isinstance(self.step, Converse)
        if environment not in self._episodes:
            episodes = Episodes({"name": environment, "settings": self.step.settings})
            if episodes.environment.begin is None:
                raise ValueError(
                    f"steps.{self.context.name}: environment {environment} does not hold conversations with tools; "
                    "use a step with kind=verify"
                )
            self._episodes[environment] = episodes
        return self._episodes[environment]

    def rows(self, answers: tuple[Output, Index] | None) -> Iterator[Row]:
        """Yield the rows with their answers, in the order of the input rows.

        Args:
            answers: return value of `ask`; None if no row needs a request.

        Raises:
            Fooled: the judge accepted too many canaries.
        """
        by_row, planted, fooled = _answers(*answers) if answers else iter(()), 0, 0
        canaries, numbers = self.canaries, self.context.counts.numbers
        numbers |= {"answers": 0, "prompt_tokens": 0, "completion_tokens": 0}
        for row, asked, is_canary in with_canaries(self.context, canaries, self.step.when):
            self.context.counts.rows += not is_canary
            if not asked:
                yield row
                continue
            if problem := self._problem(row):
                self.context.drop(row, "wrong reference", problem)
                continue
            key, row_answers = next(by_row)
            if key != row[ID]:
                raise ValueError(
                    f"steps.{self.context.name}.when gave different results for row {row[ID]}: it must depend only on "
                    "the row and the seed"
                )
            if len(row_answers) != (samples := self.step.samples or 1):
                raise ValueError(
                    f"steps.{self.context.name}: row {key} has {len(row_answers)} of {samples} answers: remove "
                    f"{self.context.folder} to start over, or choose another output"
                )
            for answer in row_answers:
                numbers["answers"] += 1
                numbers["prompt_tokens"] += answer.get("prompt_tokens") or 0
                numbers["completion_tokens"] += answer.get("completion_tokens") or 0
                if is_canary and canaries is not None:
                    if not answer["problem"]:
                        planted += 1
                        fooled += self._fooled(canaries, row, answer)
                elif (new_row := self._with_answer(row, answer)) is not None:
                    yield new_row
        if self._unreadable is not None and not self._readable:
            raise self._unreadable
        numbers |= count_canaries(canaries, planted, fooled, self.context)

    def _fooled(self, canaries: Canaries, row: Row, answer: Mapping[str, Any]) -> bool:
        assert isinstance(self.step, Ask)
        names = self._names(row, answer)
        try:
            columns = self.context.columns("columns", self.step.columns, names)
            return bool(self.context.value("canaries.fooled", canaries.fooled, names | columns))
        except ValueError:
            return False

    def _names(self, row: Row, answer: Mapping[str, Any]) -> dict[str, Any]:
        model = self.models[self.step.role]["model"]
        return self.context.names(
            row, **_parts(answer), model=model, sample=answer["sample"], samples=self.step.samples or 1
        )

    def _with_answer(self, row: Row, answer: Mapping[str, Any]) -> Row | None:
        """Return the row with the columns made from an answer; None if it is dropped, which is counted by reason."""
        new_row = dict(row)
        if self.step.samples is not None:
            new_row[ID] = f"{row[ID]}/{self.context.name}.{answer['sample']}"
        if answer["problem"]:
            self.context.drop(new_row, "no answer", answer["problem"])
            return None
        if isinstance(self.step, Converse):
            more = {"tokens": answer["completion_tokens"], "samples": self.step.samples}
            if not row.get("tools"):
                more["tools"] = list(self._task(row).tools)
            return {**new_row, **read(answer["answer"]), **more}
        if answer["finish_reason"] == "length" and not self.step.truncated:
            self.context.drop(new_row, "truncated")
            return None
        names = self._names(new_row, answer)
        if not names["answer"] and not names["tool_calls"]:
            self.context.drop(new_row, "empty answer")
            return None
        if not self.step.refusals and refuses(names["answer"]):
            self.context.drop(new_row, "refusal", " ".join(names["answer"][:80].split()))
            return None
        try:
            columns = self.context.columns("columns", self.step.columns, names)
            new_row |= columns
            satisfied = self.context.satisfies(new_row, self.step.require, names | columns)
        except ValueError as error:  # answers may be anything
            self._unreadable = self._unreadable or error
            self.context.drop(new_row, "unreadable answer", str(error))
            return None
        self._readable += 1
        return new_row if satisfied else None


def _parts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that expressions may use for an answer, such as `answer`, `reasoning` and `tool_calls`.

    `answer` has the answer columns of a batch job's output (`nemo_ext.generate`).
    """
    calls = answer["tool_calls"] or []
    calls = json.loads(calls) if isinstance(calls, str) else calls
    finished = answer["finish_reason"] != "length"
    response = said(answer["answer"] or "", answer["reasoning"], [], finished=finished).response
    return {
        "answer": response.answer,
        "reasoning": response.thinking or None,
        "tool_calls": calls,
        "finish_reason": answer["finish_reason"],
        "tokens": answer["completion_tokens"],
    }


def _answers(output: Output, index: Index) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each row's key and its answers and failures, sorted by sample number; `problem` is "" in answers.

    Rows are in the order of the input.
    """
    for range_ in index.ranges:
        rows = Rows.from_paths((range_.part.path,), "key").read(range_)
        keys = [str(row["key"]) for row in rows]
        answers: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
        for key, _, answer in output.kept(range_, keys):
            answers[key].append({**answer, "problem": ""})
        for failure in output.failures(range_):
            answers[failure["key"]].append(failure)
        for key in keys:
            yield key, sorted(answers[key], key=lambda answer: answer["sample"])
