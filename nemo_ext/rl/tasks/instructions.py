"""Prompts with one to ten instructions that a program can check, as in Llama-Nemotron, section 6.1.

The level is the number of instructions. They are drawn so that one answer can follow all of them; `solution` writes it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from nemo_ext.chat.response import parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels, whole
from nemo_ext.rl.verifiers.instruction_rules import sentences
from nemo_ext.rl.verifiers.instructions import check, verify
from nemo_ext.rl.worlds.world import one_of

LEVELS = 10

TOPICS = ("a garden", "a railway station", "a school", "a kitchen", "a mountain village", "a library", "a harbour")
_SUBJECTS = ("The morning", "Every visitor", "The old clock", "A small bird", "The street", "Our neighbour", "The wind")
_VERBS = ("brings", "remembers", "carries", "shows", "finds", "changes", "greets")
_OBJECTS = ("a new story", "the quiet light", "some fresh bread", "the people here", "a good reason", "the long day")
_KEYWORDS = ("lantern", "bridge", "copper", "meadow", "pocket", "ribbon", "summer", "thunder", "velvet", "window")
_FORBIDDEN = ("never", "very", "beautiful", "problem", "suddenly", "amazing", "however", "maybe")
_ENDINGS = ("That is all for today.", "Thank you for reading.", "Let me know what you think.")
_CAPITALS = ("NORTH", "SOUTH", "EAST", "WEST")

# At most one rule of each set is drawn.
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("keywords:existence",),
    ("keywords:frequency",),
    ("keywords:forbidden_words",),
    ("keywords:letter_frequency",),
    ("length_constraints:number_sentences",),
    ("length_constraints:number_words",),
    ("length_constraints:number_paragraphs", "paragraphs:paragraphs2"),
    ("detectable_content:number_placeholders",),
    ("detectable_content:postscript",),
    ("detectable_format:number_bullet_lists",),
    ("detectable_format:number_highlighted_sections",),
    ("detectable_format:title",),
    ("startend:end_checker", "startend:quotation"),
    ("change_case:capital_word_frequency", "change_case:english_lowercase", "change_case:english_capital"),
    ("punctuation:no_comma",),
    ("punctuation:punctuation_exclamation",),
)


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate prompts with `level` instructions; if None, with one to ten instructions in turn."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "instructions", task_level, index)
        topic = one_of(random, TOPICS)
        while True:  # some draws contradict each other
            places = sorted(random.permutation(len(ALTERNATIVES))[:task_level])
            chosen = [draw_instruction(random, one_of(random, ALTERNATIVES[place])) for place in places]
            reference: dict[str, Any] = {"instructions": chosen, "mode": "all", "whole_words": True}
            parsed = check(reference)
            if verify(parse_response(write_answer(reference)), parsed).outcome == "correct":
                break
        listed = "\n".join(f"{number}. {each.says()}" for number, each in enumerate(parsed.instructions, start=1))
        yield Task(
            id=f"instructions/{seed}/{task_level}/{index}",
            environment="instructions",
            prompt=(Message(role="user", content=f"Write a short text about {topic}.\n{listed}"),),
            reference=reference,
            domain="instructions",
        )


def solution(task: Task) -> str:
    """Write a text that follows all of a task's instructions."""
    return write_answer(task.reference)


def draw_instruction(random: np.random.Generator, name: str) -> dict[str, Any]:
    """Draw parameters for the rule with the id `name`; return the instruction as in a reference, {id, kwargs}."""
    number = partial(whole, random)

    def several(choices: tuple[str, ...], most: int) -> list[str]:
        return [choices[int(place)] for place in random.permutation(len(choices))[: number(1, most)]]

    relation = "at least" if random.random() < 0.6 else "less than"
    kwargs: dict[str, dict[str, Any]] = {
        "keywords:existence": {"keywords": several(_KEYWORDS, 3)},
        "keywords:frequency": {
            "keyword": one_of(random, _KEYWORDS),
            "frequency": number(2, 4),
            "relation": "at least",
        },
        "keywords:forbidden_words": {"forbidden_words": several(_FORBIDDEN, 3)},
        "keywords:letter_frequency": {
            "letter": one_of(random, ("a", "e", "r", "s", "t")),
            "let_frequency": number(5, 20),
            "let_relation": "at least",
        },
        "length_constraints:number_sentences": {
            "num_sentences": number(3, 8) if relation == "at least" else number(12, 30),
            "relation": relation,
        },
        "length_constraints:number_words": {
            "num_words": number(20, 80) if relation == "at least" else number(120, 200),
            "relation": relation,
        },
        "length_constraints:number_paragraphs": {"num_paragraphs": number(2, 4)},
        "detectable_content:number_placeholders": {"num_placeholders": number(1, 4)},
        "detectable_content:postscript": {"postscript_marker": one_of(random, ("P.S.", "P.P.S"))},
        "detectable_format:number_bullet_lists": {"num_bullets": number(2, 5)},
        "detectable_format:number_highlighted_sections": {"num_highlights": number(1, 3)},
        "startend:end_checker": {"end_phrase": one_of(random, _ENDINGS)},
        "change_case:capital_word_frequency": {"capital_frequency": number(1, 4), "capital_relation": "at least"},
    }
    return {"id": name, "kwargs": kwargs.get(name, {})}


def write_answer(reference: Mapping[str, Any]) -> str:
    """Write a text that follows a reference's instructions and is as long as they require."""
    arguments = {each["id"]: each["kwargs"] for each in reference["instructions"]}
    parts = _parts(arguments)
    for length in range(40):
        text = _assemble(arguments, parts, length)
        if _is_long_enough(arguments, text):
            return text
    return text


def _parts(arguments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return sentences with the contents that the instructions require; `arguments` maps rule ids to parameters."""
    parts = [f"Here the word {word} belongs." for word in arguments.get("keywords:existence", {}).get("keywords", ())]
    if frequency := arguments.get("keywords:frequency"):
        parts.append("We wrote " + " and ".join([frequency["keyword"]] * frequency["frequency"]) + ".")
    if placeholders := arguments.get("detectable_content:number_placeholders"):
        listed = " and ".join(f"[name {number}]" for number in range(1, placeholders["num_placeholders"] + 1))
        parts.append(f"It was written by {listed}.")
    if highlights := arguments.get("detectable_format:number_highlighted_sections"):
        listed = " and ".join(["*this part*"] * highlights["num_highlights"])
        parts.append(f"Please look at {listed}.")
    if capitals := arguments.get("change_case:capital_word_frequency"):
        parts.append("We went " + " and ".join(_CAPITALS[: capitals["capital_frequency"]]) + ".")
    return parts


def _assemble(arguments: Mapping[str, Mapping[str, Any]], parts: list[str], length: int) -> str:
    body = [*parts, *(_filler(number) for number in range(length))] or [_filler(0)]
    if several := arguments.get("length_constraints:number_paragraphs"):
        text = _divided(body, several["num_paragraphs"], "\n***\n")
    elif "paragraphs:paragraphs2" in arguments:
        text = _divided(body, 2, "\n\n")
    else:
        text = " ".join(body)
    if "detectable_format:title" in arguments:
        text = f"<<A Short Text>>\n{text}"
    if bullets := arguments.get("detectable_format:number_bullet_lists"):
        text += "".join(f"\n* Point {number} of the list." for number in range(1, bullets["num_bullets"] + 1))
    if postscript := arguments.get("detectable_content:postscript"):
        text += f"\n{postscript['postscript_marker']} We will write again soon."
    if ending := arguments.get("startend:end_checker"):
        text += f" {ending['end_phrase']}"
    if "change_case:english_lowercase" in arguments:
        text = text.lower()
    if "change_case:english_capital" in arguments:
        text = text.upper()
    return f'"{text}"' if "startend:quotation" in arguments else text


def _divided(body: list[str], number: int, divider: str) -> str:
    body = [*body, *(_filler(place + 50) for place in range(number - len(body)))]
    return divider.join([*body[: number - 1], " ".join(body[number - 1 :])])


def _is_long_enough(arguments: Mapping[str, Mapping[str, Any]], text: str) -> bool:
    letters = arguments.get("keywords:letter_frequency")
    if letters and text.lower().count(letters["letter"]) < letters["let_frequency"]:
        return False
    words = arguments.get("length_constraints:number_words")
    if words and words["relation"] == "at least" and len(text.split()) < words["num_words"]:
        return False
    few = arguments.get("length_constraints:number_sentences")
    return not (few and few["relation"] == "at least" and len(sentences(text)) < few["num_sentences"])


def _filler(number: int) -> str:
    """Return a filler sentence, which differs for each number up to several hundred."""
    subject = _SUBJECTS[number % len(_SUBJECTS)]
    verb = _VERBS[(number // 2) % len(_VERBS)]
    return f"{subject} {verb} {_OBJECTS[(number // 3) % len(_OBJECTS)]}."
