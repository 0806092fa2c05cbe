"""Personal data: e-mail and IP addresses, telephone, bank and tax numbers, by rule and by their check digits."""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from datatrove.data import Document
from datatrove.pipeline.formatters import PIIFormatter
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.job.settings import STRICT, StringsOrNone, nearest

Finder = tuple[re.Pattern[str], Callable[[str], bool]]
_PHONE = re.compile(r"(?<![\w.,/+-])\+?\(?\d[\d ()./\u2010-\u2015-]{6,18}\d(?![\w])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\d-])(?:\d[ -]?){12,18}\d(?![\d-])")
_CODICE_FISCALE = re.compile(r"\b[A-Z]{6}\d[0-9A-Z]{2}[A-Z]?\d[0-9A-Z][A-Z]\d[0-9A-Z]{2}[A-Z]\b")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
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
                for pattern, is_one in finders:

                    def replaced(match: re.Match[str], name: str = name, is_one: Any = is_one) -> str:
                        if not is_one(match.group()):
                            return match.group()
                        counts[name] = counts.get(name, 0) + 1
                        return instead[name]

                    text = pattern.sub(replaced, text)
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


def _finders(kinds: tuple[str, ...], regions: tuple[str, ...]) -> Mapping[str, list[Finder]]:
    """Patterns and checks of each kind. The longest forms come first: digits of one may look like another."""
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

    def is_phone(text: str) -> bool:
        for region in (None,) if text.startswith("+") else regions:
            try:
                if phonenumbers.is_valid_number(phonenumbers.parse(text, region)):
                    return True
            except phonenumbers.NumberParseException:
                pass
        return False

    usual = PIIFormatter()
    every: dict[str, list[Finder]] = {
        "email": [(usual.emails_replacer.regex, lambda text: True)],
        "ip": [(re.compile(rf"(?<![\w.]){usual.ip_replacer.regex.pattern}(?![\w]|\.\d)"), _is_public)],
        "iban": [(_IBAN, iban.is_valid)],
        "card": [(_CARD, lambda text: luhn.is_valid(re.sub("[ -]", "", text)) and text[0] in "3456")],
        "tax": [
            (_CODICE_FISCALE, codicefiscale.is_valid),
            (_SSN, ssn.is_valid),
            (_DNI, lambda text: dni.is_valid(text) or nie.is_valid(text)),
        ],
        "phone": [(_PHONE, is_phone)],
    }
    return {name: every[name] for name in every if name in kinds}


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False
