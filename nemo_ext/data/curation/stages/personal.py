"""Personal data: e-mail and IP addresses, telephone, bank and tax numbers, by rule and by their check digits."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
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
_PHONE = re.compile(r"(?<![\w.,/+-])\+?\(?\d[\d ()./\u2010-\u2015-]{6,18}\d(?![\w])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\d-])(?:\d[ -]?){12,18}\d(?![\d-])")
_CODICE_FISCALE = re.compile(r"\b[A-Z]{6}\d[0-9A-Z]{2}[A-Z]?\d[0-9A-Z][A-Z]\d[0-9A-Z]{2}[A-Z]\b")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_DIGITS = re.compile(r"\d+")
_AROUND, _MOST_GROUPS = 20, 6
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

    def is_phone(match: re.Match[str]) -> bool:
        number = match.group()
        if len(_DIGITS.findall(number)) > _MOST_GROUPS:  # tables of numbers
            return False
        around = match.string[max(0, match.start() - _AROUND) : match.end() + _AROUND]
        start = min(match.start(), _AROUND)
        for region in (None,) if "+" in number else regions:
            try:
                if not phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                    continue
            except phonenumbers.NumberParseException:
                continue
            # The library's matcher, which takes longer, looks around the number, to tell it from dates and times.
            for found in phonenumbers.PhoneNumberMatcher(around, region):
                if found.start < start + len(number) and found.end > start:
                    return True
        return False

    def found(pattern: re.Pattern[str], is_one: Callable[[re.Match[str]], bool]) -> Find:
        return lambda text: (match.span() for match in pattern.finditer(text) if is_one(match))

    def valid(pattern: re.Pattern[str], check: Callable[[str], bool]) -> Find:
        return found(pattern, lambda match: check(match.group()))

    every: dict[str, list[Find]] = {
        "email": [_emails],
        "ip": [valid(_IP, _is_public)],
        "iban": [valid(_IBAN, iban.is_valid)],
        "card": [valid(_CARD, lambda text: luhn.is_valid(re.sub("[ -]", "", text)) and text[0] in "3456")],
        "tax": [
            valid(_CODICE_FISCALE, codicefiscale.is_valid),
            valid(_SSN, ssn.is_valid),
            valid(_DNI, lambda text: dni.is_valid(text) or nie.is_valid(text)),
        ],
        "phone": [found(_PHONE, is_phone)],
    }
    return {name: every[name] for name in every if name in kinds}


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
