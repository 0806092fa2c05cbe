"""The step `verify`: environments judge the rows' answers; verdicts are written to a journal as they arrive."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.evaluation.score import said
from nemo_ext.generate.work import TooManyDead
from nemo_ext.job.made_of import note
from nemo_ext.job.progress import progress_of
from nemo_ext.job.records import json_line
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import prefixed_errors
from nemo_ext.rl.environments import settings_of
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict
from nemo_ext.synthesis.canaries import canaries_of, count_canaries, with_canaries
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.rows import ID, Row, read
from nemo_ext.synthesis.settings import Verify, WorkSettings

_AT_ONCE = 64
_WRONG = "reference: "


class NoVerdicts(TooManyDead):
    """Raised if too many rows have no verdict."""


@dataclass(kw_only=True)
class Verifying:
    """Execution of a step that verifies answers.

    Attributes:
        step: settings of the step.
        context: rows, folder and counts of the step.
        judge: settings of the judge (`nemo_ext.rl.judge.JudgeSettings`); None if there is none.
        work: the settings in the `synthesize` section.
    """

    step: Verify
    context: Context
    judge: Mapping[str, Any] | None
    work: WorkSettings
    _episodes: dict[str, Episodes] = field(default_factory=dict)

    def rows(self, identity: str) -> Iterator[Row]:
        """Verify the rows' answers and yield the rows with their verdicts.

        Args:
            identity: digest of everything that the verdicts depend on.

        Raises:
            ValueError: an environment is unknown, or its judge cannot be reached.
            NoVerdicts: more rows have no verdict than `work.max_dead` allows.
            Fooled: the judge accepted too many canaries.
        """
        record, journal = (self.context.folder / OWN / name for name in ("verified.json", "verdicts.jsonl"))
        if not record.exists() or json.loads(record.read_text())["identity"] != identity:
            journal.unlink(missing_ok=True)
            note(record, {"identity": identity})
        known = self._known(journal)
        try:
            asyncio.run(self._verify(journal, known))
        finally:
            for episodes in self._episodes.values():
                episodes.shutdown()
        planted = fooled = 0
        canaries = canaries_of(self.step, self.work)
        for row, applies, is_canary in with_canaries(self.context, canaries, self.step.when):
            self.context.counts.rows += not is_canary
            if not applies:
                yield row
                continue
            verdict = known[row[ID]]
            new_row = {**row, **{name: verdict[name] for name in ("correct", "score", "why")}}
            if is_canary and canaries is not None:
                if not verdict["error"]:
                    planted += 1
                    fooled += bool(self.context.value("canaries.fooled", canaries.fooled, self.context.names(new_row)))
            elif verdict["error"]:
                wrong = verdict["why"].startswith(_WRONG)
                self.context.drop(row, "wrong reference" if wrong else "no verdict", verdict["why"])
            else:
                yield new_row
        failed = self.context.counts.dropped["no verdict"]
        if failed > self.work.max_dead * len(self.context.rows):
            raise NoVerdicts(
                f"steps.{self.context.name}: {failed:,} of {len(self.context.rows):,} rows have no verdict, more than "
                f"synthesize.max_dead={self.work.max_dead:g} allows; the first is row "
                f"{self.context.counts.examples['no verdict'][0]}; fix the cause and rerun the same command to verify "
                "these rows again, or raise synthesize.max_dead"
            )
        self.context.counts.numbers |= count_canaries(canaries, planted, fooled, self.context)

    def _known(self, journal: Path) -> dict[str, dict[str, Any]]:
        """Return the verdicts of earlier starts, keyed by row id; an incomplete last line is cut off the journal."""
        journal.touch()
        whole = journal.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        os.truncate(journal, len(whole))
        verdicts = map(read, whole.split(b"\n")[:-1])
        return {verdict[ID]: verdict for verdict in verdicts if not verdict["error"]}  # errors are retried

    async def _verify(self, journal: Any, known: dict[str, dict[str, Any]]) -> None:
        """Get the missing verdicts, and add them to the journal and to `known`."""
        canaries, running = canaries_of(self.step, self.work), set[asyncio.Task[dict[str, Any]]]()
        total, planted = len(self.context.rows), set[str]()
        with open(journal, "ab") as file, progress_of(f"{self.context.name}:", total, unit="rows") as advance:

            async def wait_until(most: int) -> None:
                nonlocal running
                while len(running) > most:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    failed = [error for task in done if (error := task.exception()) is not None]
                    for verdict in (task.result() for task in done if task.exception() is None):
                        file.write(json_line(verdict))
                        known[verdict[ID]] = verdict
                        advance(verdict[ID] not in planted)
                    file.flush()
                    if failed:
                        raise failed[0]

            try:
                for row, applies, is_canary in with_canaries(self.context, canaries, self.step.when):
                    if is_canary:
                        planted.add(row[ID])
                    if applies and row[ID] not in known:
                        await wait_until(_AT_ONCE - 1)
                        running.add(asyncio.create_task(self._entry(row)))
                    else:
                        advance(not is_canary)
                await wait_until(0)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _entry(self, row: Row) -> dict[str, Any]:
        """Return the journal entry with the verdict on a row."""
        verdict = await self._verdict(row)
        return {
            ID: row[ID],
            "correct": verdict.outcome == "correct",
            "score": verdict.score,
            "why": verdict.reason,
            "error": verdict.outcome == "error",
        }

    async def _verdict(self, row: Row) -> Verdict:
        names = self.context.names(row)
        name = self.step.environment or row.get("environment")
        if not isinstance(name, str):
            raise ValueError(
                f"steps.{self.context.name}: neither the step nor row {row[ID]} names an environment: set "
                f"steps.{self.context.name}.environment"
            )
        episodes = await self._episodes_of(name, str(row[ID]))
        reference = row.get("reference")
        if self.step.reference is not None:
            reference = self.context.columns("reference", self.step.reference, names)
        parts = {
            key: self.context.value(key, getattr(self.step, key), names)
            for key in ("answer", "reasoning", "tool_calls", "tools")
        }
        if isinstance(reference, Mapping):
            reference = {key: value for key, value in reference.items() if value is not None}
        try:
            record = {ID: str(row[ID]), "environment": name, "prompt": "-", "reference": reference}
            task = Task.from_record(record | ({"tools": parts["tools"]} if parts["tools"] else {}))
            episodes.check(task)
        except ValueError as error:
            return Verdict.error(f"{_WRONG}{error}")
        parsed = said(str(parts["answer"] or ""), parts["reasoning"], parts["tool_calls"] or [])
        turn = await episodes.turn(Episode(task=task, thinking_opened=False), parsed.response, parsed.unreadable)
        return turn.verdict or Verdict.error(f"environment {name} holds conversations: use a step with kind=converse")

    async def _episodes_of(self, name: str, row: str) -> Episodes:
        if name not in self._episodes:
            settings = dict(self.step.settings)
            if self.step.environment is None:
                settings = dict(settings.get(name) or {})
            if self.judge is not None and "judge" in settings_of(name):
                settings["judge"] = dict(self.judge)
            with prefixed_errors(f"steps.{self.context.name}: row {row}"):
                self._episodes[name] = Episodes({"name": name, "settings": settings})
            if (reach := self._episodes[name].environment.reach) is not None:
                await reach()
        return self._episodes[name]
