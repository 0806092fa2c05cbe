"""The `nemo-ext sft_data` job: workers write shards, then one process selects samples, packs them and reports.

OUTPUT/.work/              shards of tokenised texts; kept, so that different sampling or packing can reuse them
OUTPUT/train.*, valid.*    packs (`nemo_ext.data.packs.packed_files`)
OUTPUT/report.md           contents, and skipped records by reason
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.data.packs.packed_files import PackedManifest, is_packed, write_packed
from nemo_ext.data.sft.choice import Chosen, Table, choose, table_of
from nemo_ext.data.sft.report import write_report
from nemo_ext.data.sft.settings import SftSettings, read_settings
from nemo_ext.data.sft.shards import FORMAT, Piece, Work, encoder_of, make_shard, open_shard
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.text.user_files import outside
from nemo_ext.job.files import only_run_in
from nemo_ext.job.made_of import differing, digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.units import Units
from nemo_ext.job.workers import usable_cores

PART_RECORDS = 5000
PART_BYTES = 32_000_000
LATER = (
    *("preset", "output", "sampling", "packing", "validation_share", "workers", "duplicate_ids", "thinking_shares"),
    *("max_bad_share", "data_root"),
)
"""Config keys that do not affect the shards; of `thinking_shares`, only whether it is empty does."""


def run(config: Mapping[str, Any]) -> Path:
    """Write packs and a report as the composed config describes; return the report's path.

    Raises:
        ValueError: the config is invalid, a source cannot be read, the output cannot be written, or no sample is left
            to train on.
        JobFailed: a worker died.
    """
    settings = read_settings(config)
    with only_run_in(settings.output, "output"):
        try:
            return _run(config, settings)
        except OSError as error:  # a full disk or missing permissions, which the user can fix
            advice = "correct the cause; the same command resumes"
            raise ValueError(f"output={settings.output} cannot be written ({error}): {advice}") from error


def _run(config: Mapping[str, Any], settings: SftSettings) -> Path:
    encoder_of.cache_clear()  # the files may have changed since an earlier run in this process
    work = Work(settings, Units(settings.output / ".work"))
    if not work.encoder.ends_turns:  # fails on an unusable template or tokenizer before anything is read
        notice(
            f"chat template {work.encoder.template.name} does not end turns with a control token of the tokenizer: a "
            "model trained on these texts may not end its answers; set another template"
        )
    settings.screen.check()
    inputs = [path for source in settings.sources for _, path in source.check()]
    parts = [
        (number, part)
        for number, source in enumerate(settings.sources)
        for part in source.parts(max_documents=PART_RECORDS, max_size=PART_BYTES)
    ]
    pieces = [Piece(index, number, part) for index, (number, part) in enumerate(parts)]
    _prepare_folder(config, work, inputs)
    workers, total = settings.workers or usable_cores(), sum(piece.size for piece in pieces)
    work.units.run(partial(make_shard, work), pieces, workers=workers, label="conversations", total=total)
    table = table_of([open_shard(work, piece) for piece in pieces], settings.packing)
    chosen = choose(table, settings)
    packed = _pack(work, table, chosen, settings)
    report = write_report(settings, table, chosen, packed)
    for name, manifest in packed.items():
        notice(f"{name}: {manifest.contents()}")
    if chosen.all_skipped.skipped:
        notice(f"skipped: {chosen.all_skipped.summary(examples=0)}")
    notice(f"report: {report}")
    return report


def _prepare_folder(config: Mapping[str, Any], work: Work, inputs: Sequence[Path]) -> None:
    """Prepare the shard folder; shards made from different inputs or settings are removed."""
    folder, settings = work.units.folder, work.settings
    tokenizer, template = work.encoder.tokenizer, work.encoder.template
    read = [*inputs, *settings.screen.reads()]
    tokenizer_files = [tokenizer.path] if isinstance(tokenizer, HuggingFaceTokenizer) else []
    outside(folder, [*read, *tokenizer_files, Path(settings.template)])
    config = json.loads(json.dumps({key: value for key, value in config.items() if key not in LATER}))
    made_of = {
        "version": [__version__, FORMAT],
        **config,
        "files": {str(path): [(stat := path.stat()).st_size, stat.st_mtime_ns] for path in read},
        "the tokenizer": tokenizer.identity,
        "the template": digest([template.source, template.variables]),
        "thinking_shares": bool(settings.thinking_shares),
    }
    record = folder / "made_of.json"
    if (before := noted(record)) not in (None, made_of):
        notice(f"{folder} was {_difference(before, made_of)}, so its shards are removed: starting over")
        shutil.rmtree(folder)
    elif before is None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files that this job did not write: move them, or choose another output")
    note(record, made_of)


def _difference(before: object, now: Mapping[str, Any]) -> str:
    """Describe, for a notice, how the record of the existing shards (`before`) differs from this run's (`now`)."""
    if not isinstance(before, dict) or before.get("version") != now["version"]:
        return "made by another version of nemo_ext"
    changed = list(differing(before, now))
    return f"made from other settings or files ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)})"


def _pack(work: Work, table: Table, chosen: Chosen, settings: SftSettings) -> dict[str, PackedManifest]:
    if not len(chosen.valid) and is_packed(settings.output / "valid"):  # left by an earlier run
        for name in ("valid.json", "valid.bin", "valid.idx", "valid_loss.bin", "valid_loss.idx"):
            (settings.output / name).unlink(missing_ok=True)
    tokenizer = work.encoder.tokenizer
    files = [shard.file for shard in table.shards]
    return {
        name: write_packed(
            settings.output / name,
            files,
            settings.packing,
            vocab_size=tokenizer.vocab_size,
            tokenizer_identity=tokenizer.identity,
            rows=rows,
        )
        for name, rows in (("train", chosen.train), ("valid", chosen.valid))
        if len(rows)
    }
