"""Results of a curation: reconciled counts, the funnel and its report, and a data file of the streams."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.data.curation import report
from nemo_ext.data.curation.documents import SUFFIX
from nemo_ext.data.curation.funnel import Amount, Counts
from nemo_ext.data.curation.passes import DOCUMENTS, ENDS, READ, VALUES, VERDICTS, Work, passes_of
from nemo_ext.data.curation.settings import Plan
from nemo_ext.data.curation.stages.buckets import Buckets
from nemo_ext.data.text.documents import Unit
from nemo_ext.job.files import write_text
from nemo_ext.job.run_directory import REPORT

RESULTS = "funnel.json"
STREAMS = Path("conf", "data", "curated.yaml")
"""Data config file that lists the output's streams, for `--config-dir=OUTPUT/conf data=curated`."""


def remove(work: Work, units: Sequence[Unit]) -> None:
    """Remove the files of a pass that the next one has read."""
    for unit in units:
        for ending in (SUFFIX, VALUES, ENDS, VERDICTS):
            work.units.file(unit.number, ending).unlink(missing_ok=True)


def finish(plan: Plan, last: Work, units: Sequence[Unit]) -> None:
    """Write the funnel, the report and the data file, and print how much was kept; `last` is the last pass."""
    folder, passes = plan.settings.folder, passes_of(plan.stages)
    counts = {stream: Counts() for stream in plan.streams}
    for current in passes:
        for unit in units:
            counts[unit.stream].add(Work(last.config, current.number).counts(unit.number))
    for stream, stream_counts in counts.items():
        _check_sums(stream, stream_counts, list(plan.stages))
    for temporary in folder.rglob(".*.tmp"):  # from workers that were killed
        with suppress(OSError):
            temporary.unlink()
    remove(last, units)
    write_text(folder / STREAMS, _data_file(plan, counts))
    about: dict[str, object] = {
        "preset": plan.settings.preset or "none",
        "stages": ", ".join(plan.stages),
        "passes": len(passes),
    }
    if plan.skipped:
        about["not run"] = ", ".join(f"{name} (no {missing})" for name, missing in plan.skipped.items())
    page = report.page(about, counts, list(plan.stages)).write(folder / REPORT, page=True)
    write_text(folder / RESULTS, json.dumps({name: asdict(each) for name, each in counts.items()}, indent=1) + "\n")
    first, kept = Amount(), Amount()
    for stream_counts in counts.values():
        first.add(stream_counts.stage(READ).kept)
        for written in stream_counts.written.values():
            kept.add(written)
    print(
        f"kept {kept.documents:,} of {first.documents:,} documents, {kept.bytes / 1e6:,.1f} of "
        f"{first.bytes / 1e6:,.1f} MB: {page}"
    )


def _check_sums(stream: str, counts: Counts, names: Sequence[str]) -> None:
    """Raise ValueError if a stream's documents are not all accounted for.

    Each of the stages `names` must have received all documents that the previous stage kept, and kept or dropped each
    of them; all documents that the last stage kept must have been written.
    """
    before = counts.stage(READ).kept
    for name in names:
        through = counts.stage(name)
        dropped = sum(reason.amount.documents for reason in through.dropped.values())
        if through.came.documents != before.documents or through.kept.documents + dropped != before.documents:
            raise ValueError(
                f"stream {stream!r}: stage {name!r} should have received {before.documents:,} documents, but counted "
                f"{through.came.documents:,}, kept {through.kept.documents:,} and dropped {dropped:,}: files in the "
                "output folder were changed; remove the folder and run again"
            )
        before = through.kept
    if (written := sum(amount.documents for amount in counts.written.values())) != before.documents:
        raise ValueError(
            f"stream {stream!r}: {before.documents:,} documents were kept, but {written:,} were written: remove the "
            "output folder and run again"
        )


def _data_file(plan: Plan, counts: Mapping[str, Counts]) -> str:
    """Return a data config (YAML) for training on the output; a stream's weight is its bytes times its bucket rate."""
    folder = plan.settings.folder.absolute()
    rated = (stage for stage in plan.stages.values() if isinstance(stage, Buckets) and stage.rate is not None)
    buckets = next(rated, None)
    streams: list[dict[str, Any]] = []
    for stream_counts in counts.values():
        for place, amount in stream_counts.written.items():
            rate = buckets.rates[int(place.rpartition("/")[2])] if buckets is not None else 1.0
            path = f"{folder / DOCUMENTS / place}/*{SUFFIX}"
            source = {"kind": "jsonl", "path": path, "deduplicate": False}
            streams.append({"name": place.replace("/", "."), "weight": round(amount.bytes * rate), "source": source})
    data = {"directory": str(folder / "tokens"), "streams": streams}
    heading = "# @package _global_\n# Output of `nemo-ext curate`; weights are bytes"
    heading += ", times the rates of the buckets.\n" if buckets is not None else ".\n"
    return heading + yaml.safe_dump({"data": data}, sort_keys=False)
