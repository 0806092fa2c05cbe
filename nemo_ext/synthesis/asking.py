"""Steps that ask: answers to rows, and conversations, in the folder of a batch job (`nemo_ext.generate`)."""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.chat.formats import thinking_mode
from nemo_ext.endpoint.client import Client, Request
from nemo_ext.evaluation.score import said
from nemo_ext.generate.batch import A_DAY, Asks, answer_all, held_part_rows, made_of
from nemo_ext.generate.output import Output
from nemo_ext.generate.prompts import without_nulls
from nemo_ext.generate.rows import Index, Rows
from nemo_ext.generate.settings import BATCH, GenerateSettings
from nemo_ext.job import seeds
from nemo_ext.job.files import only_run_in
from nemo_ext.job.leases import Leases
from nemo_ext.job.made_of import check_same, digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.records import json_line
from nemo_ext.job.run_directory import OWN
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.verifiers.refusal import refuses
from nemo_ext.synthesis.canaries import canaries_of, told, with_canaries
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.conversing import Conversing, Play
from nemo_ext.synthesis.known import Known
from nemo_ext.synthesis.rows import ID, Row, read, written
from nemo_ext.synthesis.settings import Ask, Canaries, Converse, WorkSettings

_KNOWN = "known.sqlite"
_TRIED = 20
_SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "extra")
_REQUEST = {
    Ask: ("role", "prompt", "messages", "system", "tools", "thinking", "complete", "samples", *_SAMPLING),
    Converse: ("role", "environment", "settings", "thinking", "samples", "user", *_SAMPLING),
}
"""Settings that answers depend on: others may change without a new question."""


@dataclass(kw_only=True)
class Asking:
    """An asking step at work.

    Attributes:
        step: its settings.
        context: its rows, folder and counts.
        clients: client of each role, made anew for every step.
        work: how the work is done.
        models: name and checkpoint of each role's model.
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
        """Write the rows that are asked about, canaries among them, unless they are there.

        Each set of rows has a file and a folder of answers of its own, so that nothing is lost where rows change;
        answers to the same requests are taken over (`Known`).

        Args:
            identity: digest of all that the rows depend on.

        Returns:
            The file; None if there are no rows.

        Raises:
            ValueError: answers of earlier rows were asked for otherwise.
        """
        record, new = self.context.folder / OWN / "asked.json", self.context.folder / OWN / "asked.new"
        if (held := noted(record)) is not None:
            file = self.context.folder / held["file"]
            if held["identity"] == identity and file.exists():
                return file if held["rows"] else None
        number = 0
        with written(new) as write:
            for row, asked, _ in with_canaries(self.context, self.canaries, self.step.when):
                if asked:
                    write({"key": row[ID], "row": json_line(row).decode()})
                    number += 1
        with open(new, "rb") as content:
            name = digest([hashlib.file_digest(content, "sha256").hexdigest(), self.work.part_rows])[:12]
        file = self.context.folder / f"asked-{name}.jsonl"
        self._take_over(self._folder(file))
        new.replace(file)
        note(record, {"identity": identity, "file": file.name, "rows": number})
        return file if number else None

    def _folder(self, asked: Path) -> Path:
        """Folder of the answers to rows."""
        return asked.with_name(f"answers-{asked.stem.removeprefix('asked-')}")

    def _take_over(self, folder: Path) -> None:
        """Keeps the answers of other folders by their requests, for a folder that has not begun."""
        others = []
        for asked in sorted(self.context.folder.glob("asked-*.jsonl")):
            other = self._folder(asked)
            before = made_of(other)
            if before is None or other == folder:
                continue
            begun = f"steps.{self.context.name}: {other}: was begun otherwise"
            check_same(before, {**before, **self._made_of()}, begun, self._otherwise())
            others.append((asked, other))
        if others and made_of(folder) is None:
            (folder / OWN).mkdir(parents=True, exist_ok=True)
            number = Known(folder / OWN / _KNOWN).write(each for pair in others for each in self._kept(*pair))
            notice(
                f"{self.context.name}: the rows before it changed; {number:,} answers are kept for those that did not"
            )

    def _kept(self, asked: Path, folder: Path) -> Iterator[tuple[Request, Mapping[str, Any]]]:
        """Answers of a folder with their requests."""
        rows = Rows.of((str(asked),), "key")
        leases = Leases(folder / OWN / "leases", self.work.lease)
        output = Output(folder=folder, format="parquet", schema=None, names={}, leases=leases)
        ranges = rows.index(held_part_rows(folder)).ranges
        output.set_aside_damaged(ranges)
        for range_ in ranges:
            by_key = {str(row["key"]): row for row in rows.read(range_)}
            for key, sample, answer in output.kept(range_, list(by_key)):
                yield self.request(by_key[key], sample), answer

    def _otherwise(self) -> str:
        return f"go back to that, name another output, or remove {self.context.folder} to ask again"

    def _made_of(self) -> dict[str, Any]:
        """What answers depend on beside the rows."""
        given = {name: getattr(self.step, name) for name in _REQUEST[type(self.step)]}
        models = {role: self.models[role] for role in self.step.roles()}
        made = {self.context.name: json.loads(json.dumps(given, default=asdict)), "seed": self.context.seed}
        return {**made, "models": models}

    @property
    def canaries(self) -> Canaries | None:
        """Canaries of the step."""
        return canaries_of(self.step, self.work) if isinstance(self.step, Ask) else None

    async def ask(self, asked: Path) -> tuple[Output, Index]:
        """Answers to all rows of a file; see `answer_all`."""
        settings = GenerateSettings(key="key", **{name: getattr(self.work, name) for name in BATCH})
        rows, folder = Rows.of((str(asked),), "key"), self._folder(asked)

        def asks(index: Index) -> Asks:
            self._try(rows.read(index.ranges[0])[:_TRIED])
            return Asks(prompts=self, made_of=self._made_of(), known=Known(folder / OWN / _KNOWN).reader())

        client = self.clients[self.step.role]
        if not isinstance(self.step, Converse):
            return await self._answered(client, rows, asks, folder, settings)
        if self.step.user is None:
            talking = Conversing(client, self.step, self.context, self.episodes)
            return await self._answered(talking, rows, asks, folder, settings)
        async with self.clients[self.step.user.role] as user:
            await user.check()
            talking = Conversing(client, self.step, self.context, self.episodes, user)
            return await self._answered(talking, rows, asks, folder, settings)

    async def _answered(
        self, client: Client, rows: Rows, asks: Any, folder: Path, settings: GenerateSettings
    ) -> tuple[Output, Index]:
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

    def _try(self, asked: list[dict[str, Any]]) -> None:
        """Refuses templates that fit none of the first rows: that costs nothing yet."""
        problems = []
        for row in asked:
            try:
                self.request(row, 0)
                return
            except ValueError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def request(self, row: Mapping[str, Any], sample: int) -> Request:
        """One of the requests of a row; see `Requests`."""
        key, columns = str(row["key"]), read(row["row"])
        names = (self.context.seed, "synthesize", self.context.name, key, sample)
        seed = seeds.digest(*names) >> 33  # some servers take no more than 31 bits
        body = self.step.sampling.body() | {"seed": seed}
        if self.step.thinking is not None:
            value = self.context.value("thinking", self.step.thinking, self.context.names(columns))
            mode = thinking_mode(value, f"steps.{self.context.name}.thinking: row {key}")
            if mode is not None:
                given = body.get("chat_template_kwargs") or {}
                body["chat_template_kwargs"] = {**given, "enable_thinking": mode}
        if isinstance(self.step, Converse):
            task = self._task(columns)
            self.episodes(task.environment).reference(task)  # refuses what cannot be verified
            return Play(key=key, sample=sample, body=body, task=task, row=columns)
        prompt, tools = self.prompt_of(columns), self._tools(columns)
        if self.step.complete:
            if not isinstance(prompt, str):
                raise ValueError(f"steps.{self.context.name}.complete: {key}: messages are no text")
            return Request(key=key, sample=sample, path="completions", body=body | {"prompt": prompt})
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        more = {"tools": tools} if tools else {}
        return Request(key=key, sample=sample, body=body | more | {"messages": messages})

    def prompt_of(self, row: Row) -> Any:
        """Text or messages that a row's request asks.

        Raises:
            ValueError: the template fails, or gives neither.
        """
        assert isinstance(self.step, Ask)
        names = self.context.names(row)
        if self.step.prompt is not None:
            found: Any = self.context.text("prompt", self.step.prompt, names)
        else:
            found = self.context.value("messages", str(self.step.messages), names)
        if not isinstance(found, str) and not (
            isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found)
        ):
            raise ValueError(f"steps.{self.context.name}: {str(found)[:60]!r}: expected a text or messages")
        found = found if isinstance(found, str) else without_nulls(found)
        system = self.context.text("system", self.step.system, names) if self.step.system else ""
        if not system:
            return found
        if self.step.complete:
            return f"{system}\n\n{found}"
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
        if messages[0].get("role") == "system":
            system, messages = f"{system}\n\n{messages[0].get('content')}", messages[1:]
        return [{"role": "system", "content": system}, *messages]

    def _tools(self, row: Row) -> Any:
        assert isinstance(self.step, Ask)
        if self.step.tools is None:
            return None
        return self.context.value("tools", self.step.tools, self.context.names(row))

    def _task(self, row: Row) -> Task:
        assert isinstance(self.step, Converse)
        names = ("prompt", "reference", "tools")
        environment = self.step.environment or row.get("environment")
        record = {ID: row[ID], "environment": environment, **{name: row[name] for name in names if row.get(name)}}
        if isinstance(given := record.get("reference"), Mapping):
            record["reference"] = {key: held for key, held in given.items() if held is not None}
        return Task.from_record(record, f"steps.{self.context.name}: row {row[ID]}")

    def episodes(self, environment: str) -> Episodes:
        """The world of a name."""
        assert isinstance(self.step, Converse)
        if environment not in self._episodes:
            found = Episodes({"name": environment, "settings": self.step.settings})
            if found.environment.begin is None:
                raise ValueError(f"steps.{self.context.name}.environment={environment}: is no world with tools")
            self._episodes[environment] = found
        return self._episodes[environment]

    def rows(self, answers: tuple[Output, Index] | None) -> Iterator[Row]:
        """Rows with their answers, in the order of those before.

        Args:
            answers: what `answered` has returned.

        Raises:
            Fooled: too many canaries were taken for right.
        """
        found, planted, fooled = _answers(*answers) if answers else iter(()), 0, 0
        canaries, numbers = self.canaries, self.context.counts.numbers
        numbers |= {"answers": 0, "prompt_tokens": 0, "completion_tokens": 0}
        for row, asked, is_canary in with_canaries(self.context, canaries, self.step.when):
            self.context.counts.rows += not is_canary
            if not asked:
                yield row
                continue
            key, own = next(found)
            if key != row[ID]:
                raise ValueError(f"steps.{self.context.name}.when: is not the same for a row each time: {row[ID]}")
            if len(own) != (self.step.samples or 1):
                raise ValueError(f"steps.{self.context.name}: row {key}: {len(own)} answers: {self._otherwise()}")
            for answer in own:
                numbers["answers"] += 1
                numbers["prompt_tokens"] += answer.get("prompt_tokens") or 0
                numbers["completion_tokens"] += answer.get("completion_tokens") or 0
                if is_canary and canaries is not None:
                    if not answer["problem"]:
                        planted += 1
                        fooled += self._fooled(canaries, row, answer)
                elif (made := self._made(row, answer)) is not None:
                    yield made
        if self._unreadable is not None and not self._readable:
            raise self._unreadable
        numbers |= told(canaries, planted, fooled, self.context)

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

    def _made(self, row: Row, answer: Mapping[str, Any]) -> Row | None:
        """The row with its answer; None if it leaves, which is counted."""
        made = dict(row)
        if self.step.samples is not None:
            made[ID] = f"{row[ID]}/{self.context.name}.{answer['sample']}"
        if answer["problem"]:
            self.context.drop(made, "no answer", answer["problem"])
            return None
        if isinstance(self.step, Converse):
            more = {"tokens": answer["completion_tokens"], "samples": self.step.samples}
            return {**made, **read(answer["answer"]), **more}
        if answer["finish_reason"] == "length" and not self.step.truncated:
            self.context.drop(made, "truncated")
            return None
        names = self._names(made, answer)
        if not names["answer"] and not names["tool_calls"]:
            self.context.drop(made, "empty answer")
            return None
        if not self.step.refusals and refuses(names["answer"]):
            self.context.drop(made, "refusal", " ".join(names["answer"][:80].split()))
            return None
        try:
            new = self.context.columns("columns", self.step.columns, names)
            made |= new
            kept = self.context.satisfies(made, self.step.require, names | new)
        except ValueError as error:  # a model may say anything
            self._unreadable = self._unreadable or error
            self.context.drop(made, "unreadable answer", str(error))
            return None
        self._readable += 1
        return made if kept else None


def _parts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What expressions see of an answer."""
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
    """Answers and failures of each row, in the order of the rows."""
    for range_ in index.ranges:
        asked = Rows.of((range_.part.path,), "key").read(range_)
        keys = [str(row["key"]) for row in asked]
        found: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
        for key, _, answer in output.kept(range_, keys):
            found[key].append({**answer, "problem": ""})
        for failure in output.failures(range_):
            found[failure["key"]].append(failure)
        for key in keys:
            yield key, sorted(found[key], key=lambda answer: answer["sample"])


def answered(asking: Asking, identity: str) -> tuple[Output, Index] | None:
    """Answers of an asking step, by this worker and others; None if there is nothing to ask."""
    with only_run_in(asking.context.folder / OWN, "output", wait=A_DAY):
        asked = asking.prepare(identity)
    return None if asked is None else asyncio.run(asking.ask(asked))
