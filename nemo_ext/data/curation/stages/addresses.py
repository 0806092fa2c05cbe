"""Documents by their address: blocklists, and what its owners do not want to be trained on."""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from datatrove.data import Document
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, url_of
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.user_files import find_files, open_lines
from nemo_ext.job.settings import STRICT, StringsOrNone


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Listed(Stage):
    """Documents on a list, by domain, address or id; lists are files (also .gz, .zst) of one entry a line, # a comment.

    Attributes:
        domains: files of domains; one stands for those below it too.
        urls: files of addresses, compared without scheme, `www.`, fragment and a slash at the end.
        ids: files of ids.
        words: files of words that an address must not have between its punctuation.
        robots: JSONL files of `{"domain": ..., "robots": text of its robots.txt}`.
        agents: names of crawlers that a robots.txt may refuse.
        without_url: what comes of a document that has no address.
    """

    kind: ClassVar[str] = "listed"
    domains: StringsOrNone = ()
    urls: StringsOrNone = ()
    ids: StringsOrNone = ()
    words: StringsOrNone = ()
    robots: StringsOrNone = ()
    agents: Annotated[StringsOrNone, Field(min_length=1)] = ("CCBot", "GPTBot", "Google-Extended", "anthropic-ai")
    without_url: Annotated[str, Field(pattern="^(keep|drop)$")] = "keep"

    def check(self) -> None:
        if not self.reads():
            raise ValueError(f"{self.kind}: no list is given: set domains, urls, ids, words or robots")
        for place, _ in _robots(self.robots):
            if not place:
                raise ValueError(f"{self.kind}: robots: a line is not {{'domain': ..., 'robots': ...}}")

    def reads(self) -> list[Path]:
        named = (self.domains, self.urls, self.ids, self.words, self.robots)
        return [path for paths in named if paths for path in find_files(paths, self.kind)]

    def start(self) -> Judge:
        domains, words = (frozenset(map(str.lower, _entries(paths))) for paths in (self.domains, self.words))
        ids = frozenset(_entries(self.ids))
        urls = frozenset(map(_plain, _entries(self.urls)))
        refused = _refused(dict(_robots(self.robots)), self.agents)

        def judge(document: Document) -> Drop | None:
            if document.id in ids:
                return Drop("id", document.id)
            url = url_of(document)
            if url is None:
                return Drop("no-url") if self.without_url == "drop" else None
            plain = _plain(url)
            if plain in urls:
                return Drop("url", url)
            host = plain.partition("/")[0].partition(":")[0]
            for domain in _above(host):
                if domain in domains:
                    return Drop("domain", url)
                if (robots := refused(domain)) is not None and robots(url):
                    return Drop("robots", url)
            if words and not words.isdisjoint(_pieces(plain)):
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


def _plain(url: str) -> str:
    """An address without what does not matter to which page it is."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
    except ValueError:  # crawls have such
        return url.lower()
    host = (parts.netloc.rpartition("@")[2]).lower().removeprefix("www.")
    query = f"?{parts.query}" if parts.query else ""
    return f"{host}{parts.path.rstrip('/')}{query}"


def _above(host: str) -> Iterator[str]:
    """A host and the domains that it is below."""
    while host:
        yield host
        host = host.partition(".")[2]


def _pieces(plain: str) -> list[str]:
    return "".join(character if character.isalnum() else " " for character in plain.lower()).split()


def _robots(paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for path in find_files(paths, "listed") if paths else ():
        with open_lines(str(path)) as file:
            for line in file:
                try:
                    record = json.loads(line)
                    yield str(record["domain"]).lower().removeprefix("www."), str(record["robots"])
                except (ValueError, LookupError, TypeError):
                    yield "", ""


def _may(parser: RobotFileParser, agent: str, url: str) -> bool:
    try:
        return parser.can_fetch(agent, url)
    except ValueError:  # no address
        return True


def _refused(texts: dict[str, str], agents: tuple[str, ...]) -> Callable[[str], Callable[[str], bool] | None]:
    """A function from a domain to whether its robots.txt refuses one of the agents an address; None without one."""

    @lru_cache(maxsize=10_000)
    def of(domain: str) -> Callable[[str], bool] | None:
        if (text := texts.get(domain)) is None:
            return None
        parser = RobotFileParser()
        parser.parse(text.splitlines())
        return lambda url: not all(_may(parser, agent, url) for agent in agents)

    return of
