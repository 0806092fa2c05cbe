"""Words, names and sentences for generated problems. Their statements are invented."""

from collections.abc import Iterator
from itertools import count

import numpy as np


def _words(text: str, between: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(between))


ADJECTIVES = _words(
    "amber ancient brass bright broad calm careful clever copper crimson distant dusty early famous gentle golden "
    "green grey hidden hollow humble iron large late lively lonely narrow northern old pale patient plain polished "
    "quiet red rough rustic silent silver simple small soft southern steady stone strange sturdy sunny tall tiny "
    "velvet violet warm western white wide wooden yellow young"
)
NOUNS = _words(
    "anchor apple arrow barrel basket bell blanket boat bottle branch bridge broom bucket button candle carpet castle "
    "chair clock cloud coin compass cottage cradle cup curtain desk drum engine fence field flute forest fountain "
    "garden gate glove hammer harbour hat helmet island jar kettle key kite ladder lamp lantern letter lock mirror "
    "mountain needle oven paddle painting pencil piano pillow pocket ribbon river road roof rope saddle sail scarf "
    "school shelf ship shoe spoon stable station statue table tent ticket tower train tunnel umbrella valley violin "
    "wagon wall well wheel whistle window"
)
PEOPLE = _words(
    "baker carpenter child doctor driver farmer fisherman gardener guide historian judge librarian mason merchant "
    "miller musician nurse painter pilot postman sailor scholar shepherd singer soldier student tailor teacher "
    "traveller watchman weaver writer"
)
VERBS = _words(
    "admired borrowed carried cleaned counted described drew examined found forgot kept left measured mended moved "
    "noticed observed painted passed photographed praised remembered repaired saw sketched sold visited watched"
)
TIMES = _words(
    "in the morning; at noon; in the evening; after the rain; before the feast; during the winter; last spring; once "
    "a week; on a Sunday; after the harvest; without a word; with great care; for the second time; as usual",
    "; ",
)
TOWNS = _words(
    "Ardenfell Belmora Corvinstad Dalethwick Estrelmar Fenwickham Garrowby Hollinport Isenbrook Jorvale Kestrelton "
    "Lunemouth Marrowdale Norrvik Oakhaven Pellagrove Quillford Ravensea Silverholt Tarnwick"
)
_SYLLABLES = _words(
    "ba be bo da de di do fa fe ga ha jo ka ke la le li lo ma me mi na ne ni no pa ra re ri ro sa so "
    "ta te ti to va ve vi wa ya zo"
)

_TRIES = 100
"""Number of attempts before a name gets another syllable."""


def pick(random: np.random.Generator, words: tuple[str, ...]) -> str:
    """Draw one of the words."""
    return words[int(random.integers(len(words)))]


def sentences(random: np.random.Generator) -> Iterator[str]:
    """Yield infinitely many sentences, such as "The old baker repaired the red clock near the gate at noon."."""
    while True:
        yield (
            f"The {pick(random, ADJECTIVES)} {pick(random, PEOPLE)} {pick(random, VERBS)} the "
            f"{pick(random, ADJECTIVES)} {pick(random, NOUNS)} near the {pick(random, NOUNS)} {pick(random, TIMES)}."
        )


def unseen(random: np.random.Generator, seen: set[str], syllables: int = 3) -> str:
    """Invent a name that is not in `seen`, and add it there; names get longer when those of one length run out."""
    for tries in count():
        length = syllables + tries // _TRIES
        name = "".join(pick(random, _SYLLABLES) for _ in range(length)).capitalize()
        if name not in seen:
            break
    seen.add(name)
    return name
