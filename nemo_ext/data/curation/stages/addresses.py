"""Filters by URL and id: blocklists, and robots.txt files that disallow crawlers for training data."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from datatrove.data import Document
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, url_of
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.user_files import JsonlSource, find_files, open_lines
from nemo_ext.job.settings import STRICT, PlacesOrNone, StringsOrNone


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Listed(Stage):
    """Drops documents whose domain, URL or id is listed, one entry per line; lines starting with `#` are comments.

    Attributes:
        domains: files with domains, which include their subdomains; this and the other lists may be .gz or .zst.
        urls: files with URLs, compared without scheme, `www.`, fragment and trailing slash.
        ids: files with document ids.
        words: files with words; a URL that has one of them between its punctuation is dropped.
        robots: JSONL files with `{"domain": host, "robots": text of its robots.txt}`, interpreted by RFC 9309.
        agents: names of crawlers; a URL is dropped if its robots.txt disallows any of them.
        without_url: whether to `keep` or `drop` documents without a URL.
    """

    kind: ClassVar[str] = "listed"
    needs: ClassVar[tuple[str, ...]] = ("domains", "urls", "ids", "words", "robots")
    domains: PlacesOrNone = ()
    urls: PlacesOrNone = ()
    ids: PlacesOrNone = ()
    words: PlacesOrNone = ()
    robots: PlacesOrNone = ()
    agents: Annotated[StringsOrNone, Field(min_length=1)] = ("CCBot", "GPTBot", "Google-Extended", "ClaudeBot")
    without_url: Annotated[str, Field(pattern="^(keep|drop)$")] = "keep"

    def check(self) -> None:
        if not self.reads():
            raise ValueError("at least one list is required: set domains, urls, ids, words or robots")
        if self.robots:
            _parser()
        dict(_robots(self.robots))

    def reads(self) -> list[Path]:
        lists = (self.domains, self.urls, self.ids, self.words, self.robots)
        return [path for paths in lists if paths for path in find_files(paths, self.kind)]

    def start(self) -> Judge:
        domains = frozenset(_host(entry) for entry in _entries(self.domains))
        urls, ids = frozenset(map(_plain, _entries(self.urls))), frozenset(_entries(self.ids))
        words = frozenset(map(str.lower, _entries(self.words)))
        punctuated = [word for word in words if not word.isalnum()]  # such as words with a hyphen
        refusal_of = _refusals(dict(_robots(self.robots)), self.agents)

        def judge(document: Document) -> Drop | None:
            if document.id in ids:
                return Drop("id", document.id)
            url = url_of(document)
            if url is None:
                return Drop("no-url") if self.without_url == "drop" else None
            plain, host = _plain(url), _host(url)
            if plain in urls:
                return Drop("url", url)
            for domain in _with_parents(host):
                if domain in domains:
                    return Drop("domain", url)
            if refusal_of(host)(url):
                return Drop("robots", url)
            if words and (not words.isdisjoint(_pieces(plain)) or any(word in plain.lower() for word in punctuated)):
                return Drop("word", url)
            return None

        return judge


def _entries(paths: tuple[str, ...]) -> Iterator[str]:
    for path in find_files(paths, "listed") if paths else ():
        with open_lines(str(path)) as file:
            for line in file:
                entry = line.decode(errors="replace").strip()
                if entry and not entry.startswith("#"):
                    yield entry


def _split(url: str) -> SplitResult | None:
    """Parse a URL; None if it is malformed, as some URLs in a crawl are."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        return parts if parts.hostname else None
    except ValueError:
        return None


def _host(url: str) -> str:
    """Return the host of a URL or list entry, without `www.`, in its ASCII form (IDNA)."""
    parts = _split(url.strip().lstrip("."))
    host = (parts.hostname or "" if parts else "").strip(".").removeprefix("www.")
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _plain(url: str) -> str:
    """Normalise a URL for comparison: host, path and query, without scheme, fragment or trailing slash."""
    parts = _split(url)
    if parts is None:
        return url.lower()
    query = f"?{parts.query}" if parts.query else ""
    return f"{_host(url)}{parts.path.rstrip('/')}{query}"


def _with_parents(host: str) -> Iterator[str]:
    """Yield a host and its parent domains."""
    while host:
        yield host
        host = host.partition(".")[2]


def _pieces(plain: str) -> list[str]:
    return "".join(character if character.isalnum() else " " for character in plain.lower()).split()


def _robots(paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for place, record in JsonlSource(path=paths).rows() if paths else ():
        if not record.keys() >= {"domain", "robots"}:
            raise ValueError(
                f"{place}: each row of a `robots` file must have the keys domain and robots; correct this row"
            )
        yield _host(str(record["domain"])), str(record["robots"])


def _refusals(texts: dict[str, str], agents: tuple[str, ...]) -> Callable[[str], Callable[[str], bool]]:
    """Return a function from a host to a function that tells whether the host's robots.txt disallows a URL.

    A host without a robots.txt in `texts` disallows nothing. A URL is disallowed if any crawler may not fetch it.
    """

    @lru_cache(maxsize=10_000)
    def refusal_of(host: str) -> Callable[[str], bool]:
        if (text := texts.get(host)) is None:
            return lambda url: False
        try:
            parser = _parser()(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError):  # an unreadable robots.txt counts as a refusal
            return lambda url: True
        return lambda url: not all(_may_fetch(parser, url, agent) for agent in agents)

    return refusal_of


def _may_fetch(parser: Any, url: str, agent: str) -> bool:
    try:
        return bool(parser.can_fetch(url if "://" in url else f"https://{url}", agent))
    except ValueError:
        return False


def _parser() -> Callable[[str], Any]:
    try:
        from protego import Protego
    except ImportError as error:
        raise ValueError(f"robots requires protego ({error}): pip install 'nemo_ext[curate]'") from error
    parse: Callable[[str], Any] = Protego.parse
    return parse
