"""Registry of sources by their kind in a config: `{kind: jsonl, path: texts.jsonl, max_bytes: 8000000}`."""

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
    """Build the source that `config["kind"]` names from the other keys, the fields of its class.

    Raises:
        ValueError: A kind or key is unknown (with the nearest known), a key is missing, or a value has the wrong type.
    """
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown source kind {kind!r}: {nearest(str(kind), KINDS)}")
    values = {key: value for key, value in config.items() if key != "kind"}
    return checked(KINDS[kind], values, where=f"{kind} source", strict=True)
