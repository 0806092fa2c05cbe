"""Personal data: e-mail and IP addresses, telephone, bank and tax numbers, by rule and by their check digits."""

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
"""Where a kind of personal data begins and ends in a text."""
# The part before the @ is looked for from there: a pattern of the whole takes the square of a long text's time.
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
"""A date, a decimal, a round number."""
_OTHER_NUMBER = re.compile(r"(?:IS[BS]N|doi|DOI|VAT|IVA|#|№|https?:\S*)[\W\d]*\Z")
_AROUND, _MOST_GROUPS, _MOST_MISSES = 20, 14, 300
_DNI = re.compile(r"\b[0-9XYZ]\d{7}-?[A-Z]\b")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Personal(Stage):
    """Personal data is replaced; a document with much of it is dropped.

    Attributes:
        kinds: what is looked for.
        replacements: kind -> text in its place.
        most: number of places above which a document is dropped; null to only replace.
        regions: countries (ISO 3166) whose telephone numbers are known without the country's code.
    """

    kind: ClassVar[str] = "personal"
    kinds: StringsOrNone = ("email", "ip", "phone", "iban", "card", "tax")
    replacements: dict[str, str] = Field(default_factory=dict)
    most: Annotated[PositiveInt | None, Field()] = None
    regions: StringsOrNone = ()

    def check(self) -> None:
        for name in (*self.kinds, *self.replacements):
            if name not in _USUAL:
                raise ValueError(f"personal: {name!r}: {nearest(name, _USUAL)}")
        _finders(self.kinds, self.regions)

    def start(self) -> Judge:
        found_by = _finders(self.kinds, self.regions)
        instead = {**_USUAL, **self.replacements}

        def judge(document: Document) -> Drop | None:
            counts: dict[str, int] = {}
            text = document.text
            for name, finders in found_by.items():
                for find in finders:
                    if spans := list(find(text)):
                        counts[name] = counts.get(name, 0) + len(spans)
                        text = _replaced(text, spans, instead[name])
            number = sum(counts.values())
            if self.most is not None and number > self.most:
                told = ", ".join(f"{count} {name}" for name, count in counts.items())
                return Drop("much-of-it", f"{told}: {shown(text)}")
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
"""Dolma's texts in place of e-mail addresses, telephone numbers and IP addresses; the others in their manner."""


def _finders(kinds: tuple[str, ...], regions: tuple[str, ...]) -> Mapping[str, list[Find]]:
    """Functions that find each kind. The longest forms come first: digits of one may look like another."""
    try:
        import phonenumbers
        from stdnum import iban, luhn
        from stdnum.es import dni, nie
        from stdnum.it import codicefiscale
        from stdnum.us import ssn
    except ImportError as error:
        raise ValueError(f"personal: pip install 'nemo_ext[curate]' ({error})") from error
    for region in regions:
        if region not in phonenumbers.SUPPORTED_REGIONS:
            raise ValueError(f"personal: regions: {region!r}: {nearest(region, phonenumbers.SUPPORTED_REGIONS)}")

    @lru_cache(maxsize=10_000)
    def phones_in(around: str) -> tuple[tuple[int, int], ...]:
        regions_too = (None, *regions) if "+" in around else regions
        found = {
            (each.start, each.end)
            for region in regions_too
            for each in phonenumbers.PhoneNumberMatcher(around, region)
            if not _NO_PHONE.fullmatch(each.raw_string) and not _counts(each.raw_string)
        }
        return tuple(sorted(found))

    def phones(text: str) -> Iterator[tuple[int, int]]:
        last, misses = 0, 0
        for match in _PHONE.finditer(text):
            groups = _DIGITS.findall(match.group())
            if len(groups) > _MOST_GROUPS or not any(len(group) > 1 for group in groups) or misses > _MOST_MISSES:
                continue  # tables of numbers
            first = max(last, match.start() - _AROUND)
            before = text[first : match.start()]
            if _NO_PHONE.fullmatch(match.group()) or _OTHER_NUMBER.search(before):
                continue
            # The library's matcher looks around a number, to tell it from dates and times.
            spans = [span for span in phones_in(text[first : match.end() + _AROUND]) if first + span[1] > match.start()]
            misses = 0 if spans else misses + 1
            for start, end in spans:
                if first + start >= last and first + start < match.end():
                    last = first + end
                    yield first + start, last

    def found(pattern: re.Pattern[str], is_one: Callable[[re.Match[str]], bool]) -> Find:
        return lambda text: (match.span() for match in pattern.finditer(text) if is_one(match))

    def valid(pattern: re.Pattern[str], check: Callable[[str], bool]) -> Find:
        return found(pattern, lambda match: check(match.group()))

    every: dict[str, list[Find]] = {
        "email": [_emails],
        "ip": [valid(_IP, _is_public)],
        # Not the country's own rules: lists of banks are never complete.
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
        found = match.group()
        while len(found) > 14:  # a BIC may follow
            if is_valid(found.replace("\u00a0", " ")):
                yield match.start(), match.start() + len(found)
                break
            found = re.sub(r"[ \u00a0]?[A-Z0-9]+\Z", "", found)


def _counts(text: str) -> bool:
    """True for numbers that follow each other, such as 31 32 33 34 35."""
    groups = [int(group) for group in _DIGITS.findall(text)]
    return len(groups) > 3 and all(after - before == 1 for before, after in pairwise(groups))


def _emails(text: str) -> Iterator[tuple[int, int]]:
    end = 0
    for match in _DOMAIN.finditer(text):
        first = max(end, match.start() - _LONGEST_LOCAL)
        if (local := _LOCAL.search(text[first : match.start()])) is not None:
            end = match.end()
            yield first + local.start(), end


def _replaced(text: str, spans: list[tuple[int, int]], instead: str) -> str:
    """The text with another in the place of each span."""
    pieces, last = [], 0
    for start, end in spans:
        pieces += [text[last:start], instead]
        last = end
    return "".join([*pieces, text[last:]])


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False
