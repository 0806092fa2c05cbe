"""The job `nemo-ext generate` from Python: a data frame in, a data frame with the answers out."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.generate.batch import index_of, made_of
from nemo_ext.generate.columns import ANSWER, answer_fields, renamed
from nemo_ext.generate.job import answer
from nemo_ext.generate.output import Output
from nemo_ext.generate.rows import Rows, row_key
from nemo_ext.generate.settings import Settings
from nemo_ext.job.config import compose, hydra_value
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.job import JobFailed, invoke
from nemo_ext.job.leases import Leases
from nemo_ext.job.made_of import noted
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import checked

ERROR = "error"
"""Column with the reason why a request failed; null if it was answered."""
_INPUT, _DONE = "frame.parquet", "frame.json"


def map(
    frame: Any,
    template: str | None = None,
    *,
    output: str | Path,
    model: str | Path | None = None,
    endpoint: str | Path | None = None,
    settings: Sequence[str] = (),
    slurm: Sequence[str] = (),
) -> Any:
    """Send the rows of a data frame to a model; return the frame with the answers, in the order of the rows.

    The answers are stored in `output` as they arrive: after an interruption, or an error, the same call resumes. When
    all rows are answered, the same call only reads them. A row whose request failed has null in the answer
    columns, and the reason in `error`. docs/generate.md describes the other columns.

    Args:
        frame: pandas or polars data frame, or Arrow table; the result is of the same type. Pandas' index and dtypes
            are kept.
        template: Jinja template of the user's message over the columns; None uses the column `messages` or `prompt`.
        model: Hugging Face or run directory, which is served during the call; with `endpoint`, the model's name there.
        endpoint: run directory of `nemo-ext serve`, or URL.
        settings: further settings of `nemo-ext generate`, such as ["samples=4", "generate.max_tokens=512"].
        slurm: settings of `nemo-ext submit`, such as ["cluster=leonardo", "account=X"]: the job is submitted to Slurm,
            and the call waits for it. After an interruption the job remains queued, and the same call waits again.

    Raises:
        ValueError: a setting is invalid, or `output` was started with other rows or settings.
        JobFailed: more answers failed than `generate.max_dead` allows, the endpoint does not respond, or the job on
            Slurm ended early.
        OSError: a file cannot be written.
    """
    folder = Path(output).expanduser().absolute()
    table, file = _table(frame), folder / OWN / _INPUT
    named = {"input": file, "output": folder, "model": model, "endpoint": endpoint, "generate.template": template}
    for word in settings:
        if (key := word.partition("=")[0].lstrip("+~")) in named:
            raise ValueError(f"settings: {word}: the call sets {key} from its own arguments; remove it from settings")
    words = [f"{key}={_literal(str(value))}" for key, value in named.items() if value is not None]
    words += settings
    config = compose("generate", words)
    checked_settings = checked(Settings, config)
    if checked_settings.generate.dry_run or checked_settings.generate.format != "parquet":
        raise ValueError(
            "generate.dry_run and generate.format cannot be used with data frames: remove them from settings"
        )
    _write(table, file, checked_settings.generate.part_rows)
    done = folder / OWN / _DONE
    if noted(done) == words:
        done.unlink(missing_ok=True)  # until all answers have been read: without some, the next call requests them
    elif slurm:
        invoke("nemo_ext.slurm.submit:complete", ["job=generate", *words, *slurm])
    else:
        answer(config)
    answers = _answered(folder, checked_settings)
    if not answers[ERROR].drop_null():
        write_text(done, json.dumps(words))
    names = renamed(table.column_names, checked_settings.generate.key, answers.column_names)
    return _joined(frame, table, names, answers, checked_settings.samples)


def _literal(text: str) -> str:
    """Quote a string for Hydra, escaping `${` (as in prices or LaTeX) so that Hydra does not interpolate it."""
    return hydra_value(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def _table(frame: Any) -> Any:
    """Convert a data frame to an Arrow table, without pandas' index."""
    pyarrow = pyarrow_module()
    if isinstance(frame, pyarrow.Table):
        return frame
    if _library(frame) == "pandas":
        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    if _library(frame) == "polars" and hasattr(frame, "to_arrow"):  # its string views cannot be repeated in Arrow
        return frame.to_arrow(compat_level=sys.modules["polars"].CompatLevel.oldest())
    if not hasattr(frame, "__arrow_c_stream__"):
        raise ValueError(f"expected a pandas or polars data frame or an Arrow table, not {type(frame).__name__}")
    return pyarrow.table(frame)


def _library(frame: Any) -> str:
    return type(frame).__module__.partition(".")[0]


def _write(table: Any, file: Path, part_rows: int) -> None:
    """Write the frame as the job's input file; raise ValueError if answers to other rows were already requested."""
    pyarrow = pyarrow_module()
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, row_group_size=part_rows)
    content = buffer.getvalue()
    if not file.exists() or made_of(file.parents[1]) is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(file) as new:
            new.write(content)
    elif file.read_bytes() != content and not pyarrow.parquet.read_table(file).equals(table):  # other pyarrow, or rows
        raise ValueError(f"output={file.parents[1]} was started with other rows: choose another folder")


def _answered(folder: Path, settings: Settings) -> Any:
    """Return a table of the answers and failures of all rows, in the order of the rows; JobFailed if any is missing."""
    pyarrow, generate = pyarrow_module(), settings.generate
    rows = Rows.from_paths(settings.input, generate.key)
    index = index_of(folder, rows, generate)
    output = Output(folder, "parquet", None, {}, Leases(folder / OWN / "leases", generate.lease))
    keys = [row_key(row, generate.key) for range_ in index.ranges for row in rows.read(range_)]
    # Strings with 64-bit offsets, as all answers together may exceed 2 GiB.
    fields = [
        pyarrow.field(item.name, pyarrow.large_string() if pyarrow.types.is_string(item.type) else item.type)
        for item in (*answer_fields(), pyarrow.field(ERROR, pyarrow.string()))
    ]
    schema, parts = pyarrow.schema(fields), list[Any]()
    for range_ in index.ranges:
        for part in output.parts(range_):
            read = pyarrow.parquet.read_table(part, columns=list(ANSWER), page_checksum_verification=True)
            parts.append(read.append_column(ERROR, pyarrow.nulls(len(read), pyarrow.string())).cast(schema))
        failures = [{**line, ERROR: line["problem"]} for line in output.failures(range_)]
        parts.append(pyarrow.Table.from_pylist(failures, schema))
    answers = pyarrow.concat_tables([schema.empty_table(), *parts])
    pairs = zip(answers["key"].to_pylist(), answers["sample"].to_pylist(), strict=True)
    places = {pair: place for place, pair in enumerate(pairs)}
    wanted = [(key, sample) for key in keys for sample in range(settings.samples)]
    if missing := len({pair for pair in wanted if pair not in places}):
        raise JobFailed(
            f"output={folder}: {missing:,} answers are missing, as the job ended early (see `nemo-ext status` "
            "and `nemo-ext logs`); the same call resumes"
        )
    return answers.take([places[pair] for pair in wanted])


def _joined(frame: Any, table: Any, names: Mapping[str, str], answers: Any, samples: int) -> Any:
    """Return `frame` with each row repeated once per sample, and with the columns of `answers` appended.

    `table` is the frame as an Arrow table, and `names` maps its columns to their names in the result.
    """
    repeated = [row for row in range(len(table)) for _ in range(samples)]
    if (
        _library(frame) == "pandas"
    ):  # values and column names of its own types would not survive the conversion to Arrow
        kept = frame.iloc[repeated, [place for place, name in enumerate(table.column_names) if name in names]]
        kept.columns = [own if str(own) == new else new for own, new in zip(kept.columns, names.values(), strict=True)]
        return kept.assign(**answers.to_pandas().set_axis(kept.index))
    result = (table if samples == 1 else table.take(repeated)).select(list(names)).rename_columns(names)
    for item in answers.schema:
        result = result.append_column(item, answers[item.name])
    return type(frame)(result) if _library(frame) == "polars" else result
