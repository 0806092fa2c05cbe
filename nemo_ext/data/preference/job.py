"""The `nemo-ext preference_data` job: turns generations into filtered pairs, and writes files and a report."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.chat.template import Template
from nemo_ext.data.preference.build import Counts, Work, build, loaded, read_counts
from nemo_ext.data.preference.mix import Line, is_validation, mixed
from nemo_ext.data.preference.report import Written, page
from nemo_ext.data.preference.settings import Settings, SourceSettings
from nemo_ext.data.preference.settings import settings as read_settings
from nemo_ext.data.preference.spread import readers, spread
from nemo_ext.data.preference.write import SPLITS, read_lines, write_split
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.data.text.user_files import RecordSource, outside
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import digest, noted
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.run_directory import REPORT
from nemo_ext.job.workers import in_workers, usable_cores

_WORK = ".work"


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext preference_data` as the composed config describes, resuming an interrupted run.

    Raises:
        ValueError: a setting or an input file is invalid.
    """
    settings = read_settings(config)
    output = Path(settings.output).expanduser()
    files = {source.name: readers(source) for source in settings.sources}
    for by_side in files.values():
        for reader in by_side.values():
            outside(output / _WORK, [path for _, path in reader.inputs()])
    with only_run_in(output, "output"):
        _run(settings, files, output)


def _run(settings: Settings, files: Mapping[str, Mapping[str, RecordSource]], output: Path) -> None:
    loaded.cache_clear()  # the files may have changed since an earlier run in this process
    counts: dict[str, Counts] = {}
    parts: list[list[Path]] = []
    lines: list[list[Line]] = []
    for number, source in enumerate(settings.sources):
        built, counts[source.name] = _built(source, settings, files[source.name], output / _WORK)
        parts.append([path for path, _ in built])
        lines.append([Line(number, part, row) for part, (_, rows) in enumerate(built) for row in rows])
    chosen = mixed(
        lines,
        limits=[source.limit for source in settings.sources],
        limit=settings.limit,
        reports=[counts[source.name].pairs for source in settings.sources],
    )
    written = _write(settings, chosen, parts, output)
    _report(settings, counts, written, output)
    shutil.rmtree(output / _WORK, ignore_errors=True)


def _built(
    source: SourceSettings, settings: Settings, files: Mapping[str, RecordSource], folder: Path
) -> tuple[list[tuple[Path, list[Any]]], Counts]:
    """Build the parts of one source in `folder`; return (path, rows) of each part, and the total counts."""
    work = Work(
        source=source,
        tokenizer=json.dumps(settings.tokenizer),
        template=settings.template,
        swap=settings.swap,
        seed=settings.seed,
    )
    place = folder / _fingerprint(work, files)
    place.mkdir(parents=True, exist_ok=True)
    counts = Counts()
    records = _spread(source, files, place, counts.records, settings.max_bad_share)
    outputs = [path.with_name(path.name.replace("records", "pairs")) for path in records]
    with progress_of(f"{source.name}: pairs", len(records), unit="parts") as advance:
        tasks = list(zip(records, outputs, strict=True))
        workers = min(settings.workers or usable_cores(), len(tasks))
        for _ in in_workers(partial(build, work), tasks, workers=workers):
            advance(1)
    built = []
    for path in outputs:
        part_counts, rows = read_counts(path)
        counts.add(part_counts)
        built.append((path, rows))
    if not counts.records.records:
        raise ValueError(f"sources.{source.name}: the files have no records; give at least one file with records")
    counts.records.check_bad_share(f"sources.{source.name}", settings.max_bad_share)
    kept = sum(len(rows) for _, rows in built)
    reports = (counts.records, counts.groups, counts.pairs)
    skipped = ", ".join(report.summary(examples=0) for report in reports if report.skipped)
    notice(
        f"source {source.name}: {counts.records.records:,} records, {counts.groups.records:,} prompts, {kept:,} kept; "
        f"skipped: {skipped or 'nothing'}"
    )
    if not kept:
        reasons = "; ".join(report.summary(examples=1) for report in reports)
        notice(f"warning: source {source.name} yields no pair; check its kind, keys and filters (skipped: {reasons})")
    return built, counts


def _spread(
    source: SourceSettings, files: Mapping[str, RecordSource], place: Path, report: ReadReport, max_bad_share: float
) -> list[Path]:
    """Write the records of a source to parts, unless an earlier run has done so; return the paths."""
    done = place / "spread.json"
    if (stored := noted(done)) is not None:
        report.add(ReadReport(**stored["report"]))
        return [place / name for name in stored["parts"]]
    size = sum(path.stat().st_size for reader in files.values() for _, path in reader.inputs())
    with progress_of(f"{source.name}: reading", size) as advance:
        paths = spread(source, dict(files), place, report, max_bad_share, advance)
    write_text(done, json.dumps({"report": dataclasses.asdict(report), "parts": [path.name for path in paths]}))
    return paths


def _write(settings: Settings, chosen: Sequence[Line], parts: Sequence[Sequence[Path]], output: Path) -> Written:
    written = Written()
    splits = [[line for line in chosen if is_validation(line.row, settings.validation_share, settings.seed)]]
    splits.insert(0, [line for line in chosen if not is_validation(line.row, settings.validation_share, settings.seed)])
    formats = [*((kind, False) for kind in settings.outputs), ("genrm", True)]
    with progress_of("writing", 2 * len(chosen) * len(settings.outputs), unit="lines") as advance:
        for split, lines in zip(SPLITS, splits, strict=True):
            for staged in read_lines(lines, parts):
                written.see(staged, split)
            for kind, genrm in formats:
                wanted = [line for line in lines if line.row.genrm == genrm]
                path = output / f"{kind}_{split}.jsonl"
                if wanted:
                    write_split(wanted, parts, path, kind, advance)
                else:
                    path.unlink(missing_ok=True)  # an earlier run may have written it
    return written


def _report(settings: Settings, counts: Mapping[str, Counts], written: Written, output: Path) -> None:
    if settings.template is None and "nemo_rl" in settings.outputs and (written.tools or written.thinking):
        notice(
            f"warning: NeMo-RL passes neither tools ({written.tools:,} pairs) nor the thinking mode "
            f"({written.thinking:,} pairs with reasoning) to the chat template: set template to render the pairs here"
        )
    unit = "characters" if settings.tokenizer is None else "tokens"
    facts = {"pairs": f"{written.total(genrm=False):,}"}
    facts |= {f"{split} pairs": f"{written.total(genrm=False, split=split):,}" for split in SPLITS}
    if samples := written.total(genrm=True):
        facts["reward model samples"] = f"{samples:,}"
    facts |= {"pairs with several turns": f"{written.multi_turn:,}", "with tools": f"{written.tools:,}"}
    facts |= {"with reasoning": f"{written.thinking:,}", "seed": str(settings.seed)}
    facts |= {"lengths in": unit + (f" of chat template {settings.template}" if settings.template else "")}
    title = "Preference data" + (f": {settings.preset}" if settings.preset else "")
    page(title, facts, counts, written, unit=unit).write(output / REPORT)
    numbers = {
        "written": [[*key, count] for key, count in sorted(written.rows.items())],
        "left_out": {
            name: {stage: getattr(source, stage).skipped for stage in ("records", "groups", "pairs")}
            for name, source in counts.items()
        },
    }
    write_text(output / "report.json", json.dumps(numbers, indent=1) + "\n")
    notice(f"{facts['pairs']} pairs, {samples:,} reward model samples: {output / REPORT}")


def _fingerprint(work: Work, files: Mapping[str, RecordSource]) -> str:
    """Hash the settings and inputs on which a source's parts depend, excluding `limit`, which is applied later."""
    relevant = dataclasses.asdict(dataclasses.replace(work, source=dataclasses.replace(work.source, limit=None)))
    inputs = {side: reader.fingerprint(reader.inputs()) for side, reader in files.items()}
    if work.template is not None:
        relevant["template"] = Template.load(work.template).source
    if (tokenizer := json.loads(work.tokenizer)) is not None:
        relevant["tokenizer"] = load_tokenizer(tokenizer).identity
    return f"{work.source.name}-{digest([__version__, relevant, inputs])[:12]}"
