"""Documents by their address: blocklists, and what its owners do not want to be trained on."""

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
    """Documents on a list, by domain, address or id; lists are files (also .gz, .zst) of one entry a line, # a comment.

    Attributes:
        domains: files of domains; one stands for those below it too.
        urls: files of addresses, compared without scheme, `www.`, fragment and a slash at the end.
        ids: files of ids.
        words: files of words that an address must not have between its punctuation.
        robots: JSONL files of `{"domain": host, "robots": text of its robots.txt}`, read as RFC 9309 says.
        agents: names of crawlers that a robots.txt may refuse.
        without_url: what comes of a document that has no address.
    """

    kind: ClassVar[str] = "listed"
    domains: PlacesOrNone = ()
    urls: PlacesOrNone = ()
    ids: PlacesOrNone = ()
    words: PlacesOrNone = ()
    robots: PlacesOrNone = ()
    agents: Annotated[StringsOrNone, Field(min_length=1)] = ("CCBot", "GPTBot", "Google-Extended", "ClaudeBot")
    without_url: Annotated[str, Field(pattern="^(keep|drop)$")] = "keep"

    def check(self) -> None:
        if not self.reads():
            raise ValueError(f"{self.kind}: no list is given: set domains, urls, ids, words or robots")
        if self.robots:
            _parser()
        dict(_robots(self.robots))

    def reads(self) -> list[Path]:
        named = (self.domains, self.urls, self.ids, self.words, self.robots)
        return [path for paths in named if paths for path in find_files(paths, self.kind)]

    def start(self) -> Judge:
        domains = frozenset(_host(entry) for entry in _entries(self.domains))
        urls, ids = frozenset(map(_plain, _entries(self.urls))), frozenset(_entries(self.ids))
        words = frozenset(map(str.lower, _entries(self.words)))
        whole = [word for word in words if not word.isalnum()]  # such as words with a hyphen
        refused = _refused(dict(_robots(self.robots)), self.agents)

        def judge(document: Document) -> Drop | None:
            if document.id in ids:
                return Drop("id", document.id)
            url = url_of(document)
            if url is None:
                return Drop("no-url") if self.without_url == "drop" else None
            plain, host = _plain(url), _host(url)
            if plain in urls:
                return Drop("url", url)
            for domain in _above(host):
                if domain in domains:
                    return Drop("domain", url)
            if refused(host)(url):
                return Drop("robots", url)
            if words and (not words.isdisjoint(_pieces(plain)) or any(word in plain.lower() for word in whole)):
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
    """An address in its parts; None if it is none, as some of a crawl's are."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        return parts if parts.hostname else None
    except ValueError:
        return None


def _host(url: str) -> str:
    """Host of an address, or of a list's entry, without `www.`, in letters of ASCII."""
    parts = _split(url.strip().lstrip("."))
    host = (parts.hostname or "" if parts else "").strip(".").removeprefix("www.")
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _plain(url: str) -> str:
    """An address without what does not matter to which page it is."""
    parts = _split(url)
    if parts is None:
        return url.lower()
    query = f"?{parts.query}" if parts.query else ""
    return f"{_host(url)}{parts.path.rstrip('/')}{query}"


def _above(host: str) -> Iterator[str]:
    """A host and the domains that it is below."""
    while host:
        yield host
        host = host.partition(".")[2]


def _pieces(plain: str) -> list[str]:
    return "".join(character if character.isalnum() else " " for character in plain.lower()).split()


def _robots(paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for place, record in JsonlSource(path=paths).rows() if paths else ():
        if not record.keys() >= {"domain", "robots"}:
            raise ValueError(f"{place}: listed: robots: not {{'domain': ..., 'robots': ...}}: mend this row")
        yield _host(str(record["domain"])), str(record["robots"])


def _refused(texts: dict[str, str], agents: tuple[str, ...]) -> Callable[[str], Callable[[str], bool]]:
    """A function from a host to whether its robots.txt refuses one of the agents an address."""

    @lru_cache(maxsize=10_000)
    def of(host: str) -> Callable[[str], bool]:
        if (text := texts.get(host)) is None:
            return lambda url: False
        try:
            parser = _parser()(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError):  # what cannot be read is taken as a refusal
            return lambda url: True
        return lambda url: not all(_may(parser, url, agent) for agent in agents)

    return of


def _may(parser: Any, url: str, agent: str) -> bool:
    try:
        return bool(parser.can_fetch(url if "://" in url else f"https://{url}", agent))
    except ValueError:
        return False


def _parser() -> Callable[[str], Any]:
    try:
        from protego import Protego
    except ImportError as error:
        raise ValueError(f"listed: robots: pip install 'nemo_ext[curate]' ({error})") from error
    parse: Callable[[str], Any] = Protego.parse
    return parse
