"""Personal data found by patterns and check digits: e-mail and IP addresses, telephone, bank, card and tax numbers."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import Annotated, ClassVar

from datatrove.data import Document
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.job.settings import STRICT, StringsOrNone, nearest

Find = Callable[[str], Iterator[tuple[int, int]]]
"""Function that yields (start, end) character offsets for each occurrence of a kind of personal data in a text."""
# The part before the @ is matched backwards from there: one pattern for the whole takes quadratic time on long texts.
_DOMAIN = re.compile(r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}\b")
_LOCAL = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*\Z")
_LONGEST_LOCAL = 64
_IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_PHONE = re.compile(r"(?<![\w,/-])\+?\(?\d[\d ()./\u00a0\u2010-\u2015-]{6,40}\d(?!\w)")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(  # Visa, Mastercard, Discover, JCB; American Express
    r"(?<![\d-])(?:(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d|6(?:011|5\d\d)|35\d\d)(?:[ -]?\d{4}){3}"
    r"|3[47]\d\d[ -]?\d{6}[ -]?\d{5})(?!\d)"
)
_CODICE_FISCALE = re.compile(r"\b[A-Z]{6}\d[0-9A-Z]{2}[A-Z]?\d[0-9A-Z][A-Z]\d[0-9A-Z]{2}[A-Z]\b")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_DIGITS = re.compile(r"\d+")
_NO_PHONE = re.compile(r"\d{1,2}([./ -])\d{1,2}\1(?:\d\d|\d{4})|\d+\.\d+|\d{1,3}(?:[ .]000){2,}")
"""Dates, decimals and round numbers, which are not telephone numbers."""
_OTHER_NUMBER = re.compile(r"(?:IS[BS]N|doi|DOI|VAT|IVA|#|№|https?:\S*)[\W\d]*\Z")
_AROUND, _MOST_GROUPS = 20, 14
_DNI = re.compile(r"\b[0-9XYZ]\d{7}-?[A-Z]\b")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Personal(Stage):
    """Replaces personal data, and drops documents with too many occurrences.

    Attributes:
        kinds: kinds of personal data to find.
        replacements: mapping from kind to replacement text, in place of the default one.
        most: maximum number of occurrences, above which a document is dropped; null to only replace.
        regions: countries (ISO 3166) whose telephone numbers are recognised without a country code.
    """

    kind: ClassVar[str] = "personal"
    kinds: StringsOrNone = ("email", "ip", "phone", "iban", "card", "tax")
    replacements: dict[str, str] = Field(default_factory=dict)
    most: Annotated[PositiveInt | None, Field()] = None
    regions: StringsOrNone = ()

    def check(self) -> None:
        for key, names in (("kinds", self.kinds), ("replacements", self.replacements)):
            for name in names:
                if name not in _USUAL:
                    raise ValueError(f"{key}: unknown kind of personal data {name!r}: {nearest(name, _USUAL)}")
        _finders(self.kinds, self.regions)

    def start(self) -> Judge:
        finders_of = _finders(self.kinds, self.regions)
        replacements = {**_USUAL, **self.replacements}

        def judge(document: Document) -> Drop | None:
            counts: dict[str, int] = {}
            text = document.text
            for name, finders in finders_of.items():
                for find in finders:
                    if spans := list(find(text)):
                        counts[name] = counts.get(name, 0) + len(spans)
                        text = _replace_spans(text, spans, replacements[name])
            if self.most is not None and sum(counts.values()) > self.most:
                detail = ", ".join(f"{count} {name}" for name, count in counts.items())
                return Drop("much-of-it", f"{detail}: {shown(text)}")
            document.text = text
            return None

        return judge


_USUAL = {
    "email": "|||EMAIL_ADDRESS|||",
    "phone": "|||PHONE_NUMBER|||",
    "ip": "|||IP_ADDRESS|||",
    "iban": "|||BANK_ACCOUNT|||",
    "card": "|||CARD_NUMBER|||",
    "tax": "|||TAX_NUMBER|||",
}
"""Default replacements: Dolma's for e-mail addresses, telephone numbers and IP addresses; others in its style."""


def _finders(kinds: tuple[str, ...], regions: tuple[str, ...]) -> Mapping[str, list[Find]]:
    """Return functions that find the (start, end) spans of each kind in a text, keyed by kind.

    Kinds with longer patterns come first, since part of such a number may look like a number of a later kind.
    """
    try:
        import phonenumbers
        from stdnum import iban, luhn
        from stdnum.es import dni, nie
        from stdnum.it import codicefiscale
        from stdnum.us import ssn
    except ImportError as error:
        raise ValueError(
            f"personal requires phonenumbers and python-stdnum ({error}): pip install 'nemo_ext[curate]'"
        ) from error
    for region in regions:
        if region not in phonenumbers.SUPPORTED_REGIONS:
            raise ValueError(f"regions: unknown region {region!r}: {nearest(region, phonenumbers.SUPPORTED_REGIONS)}")

    @lru_cache(maxsize=10_000)
    def phones_in(around: str) -> tuple[tuple[int, int], ...]:
        regions_tried = (None, *regions) if "+" in around else regions
        spans = {
            (match.start, match.end)
            for region in regions_tried
            for match in phonenumbers.PhoneNumberMatcher(around, region)
            if not _NO_PHONE.fullmatch(match.raw_string) and not _is_sequence(match.raw_string)
        }
        return tuple(sorted(spans))

    def phones(text: str) -> Iterator[tuple[int, int]]:
        last = 0
        for match in _PHONE.finditer(text):
            groups = _DIGITS.findall(match.group())
            if len(groups) > _MOST_GROUPS or not any(len(group) > 1 for group in groups):
                continue  # tables of numbers
            first = max(last, match.start() - _AROUND)
            before = text[first : match.start()]
            if _NO_PHONE.fullmatch(match.group()) or _OTHER_NUMBER.search(before):
                continue
            # The library's matcher needs the context of a number, to distinguish it from dates and times.
            spans = [span for span in phones_in(text[first : match.end() + _AROUND]) if first + span[1] > match.start()]
            for start, end in spans:
                if first + start >= last and first + start < match.end():
                    last = first + end
                    yield first + start, last

    def valid(pattern: re.Pattern[str], is_valid: Callable[[str], bool]) -> Find:
        return lambda text: (match.span() for match in pattern.finditer(text) if is_valid(match.group()))

    every: dict[str, list[Find]] = {
        "email": [_emails],
        "ip": [valid(_IP, _is_public)],
        # Without the countries' own rules, since lists of banks are never complete.
        "iban": [lambda text: _ibans(text, partial(iban.is_valid, check_country=False))],
        "card": [valid(_CARD, lambda text: luhn.is_valid(re.sub("[ -]", "", text)))],
        "tax": [
            valid(_CODICE_FISCALE, codicefiscale.is_valid),
            valid(_SSN, ssn.is_valid),
            valid(_DNI, lambda text: dni.is_valid(text) or nie.is_valid(text)),
        ],
        "phone": [phones],
    }
    return {name: every[name] for name in every if name in kinds}


def _ibans(text: str, is_valid: Callable[[str], bool]) -> Iterator[tuple[int, int]]:
    for match in _IBAN.finditer(text):
        candidate = match.group()
        while len(candidate) > 14:  # a BIC may follow
            if is_valid(candidate.replace("\u00a0", " ")):
                yield match.start(), match.start() + len(candidate)
                break
            candidate = re.sub(r"[ \u00a0]?[A-Z0-9]+\Z", "", candidate)


def _is_sequence(text: str) -> bool:
    """Return whether a string consists of consecutive numbers, such as 31 32 33 34 35."""
    groups = [int(group) for group in _DIGITS.findall(text)]
    return len(groups) > 3 and all(after - before == 1 for before, after in pairwise(groups))


def _emails(text: str) -> Iterator[tuple[int, int]]:
    end = 0
    for match in _DOMAIN.finditer(text):
        first = max(end, match.start() - _LONGEST_LOCAL)
        if (local := _LOCAL.search(text[first : match.start()])) is not None:
            end = match.end()
            yield first + local.start(), end


def _replace_spans(text: str, spans: list[tuple[int, int]], replacement: str) -> str:
    """Replace each (start, end) span of a text with `replacement`."""
    pieces, last = [], 0
    for start, end in spans:
        pieces += [text[last:start], replacement]
        last = end
    return "".join([*pieces, text[last:]])


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False
