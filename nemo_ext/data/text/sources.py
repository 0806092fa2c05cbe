"""Registry of sources, keyed by `kind` in a config such as `{kind: jsonl, path: texts.jsonl, max_bytes: 8000000}`."""

from collections.abc import Mapping

from nemo_ext.data.text.corpora import DocstringsSource, PackageDocsSource, PythonStdlibSource
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.user_files import JsonlSource, ParquetSource, TextSource, TreeSource
from nemo_ext.data.text.web_archives import WarcSource
from nemo_ext.job.settings import checked, nearest

KINDS: dict[str, type[Source]] = {
    source.kind: source
    for source in (
        JsonlSource,
        ParquetSource,
        TextSource,
        TreeSource,
        WarcSource,
        PythonStdlibSource,
        DocstringsSource,
        PackageDocsSource,
    )
}


def load_source(config: Mapping[str, object]) -> Source:
    """Build the source of kind `config["kind"]`; the other keys are the fields of its class.

    Raises:
        ValueError: A kind or key is unknown (the message names the nearest one), a key is missing, or a type is wrong.
    """
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown source kind {kind!r}: {nearest(str(kind), KINDS)}")
    values = {key: value for key, value in config.items() if key != "kind"}
    return checked(KINDS[kind], values, where=f"{kind} source", strict=True)
