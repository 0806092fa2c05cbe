from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.data.preference.group import Generation, Group, prompt_digest
from nemo_ext.data.preference.hallucination import GROUPS, HallucinationRules, tool_hallucination
from nemo_ext.data.preference.pairs import Rules, delta, grid, judged, safety
from nemo_ext.data.preference.records import merged
from nemo_ext.data.text.documents import ReadReport

PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}


def answer(text: str, **known: Any) -> Generation:
    return Generation(messages=(Message(role="assistant", content=text),), **known)


def asked(*generations: Generation, **known: Any) -> Group:
    made = tuple(sorted(generations, key=lambda made: made.key))
    return Group(id="p", prompt=(Message(role="user", content="Why?"),), generations=made, **known)


@st.composite
def pools(draw: st.DrawFn) -> list[Generation]:
    texts = draw(st.lists(st.text("ab c", min_size=1, max_size=6), min_size=1, max_size=12, unique=True))
    return [
        answer(
            text,
            model=draw(st.sampled_from(["Qwen3-32B", "Qwen3-0.6B", "other"])),
            score=draw(st.none() | st.integers(1, 5).map(float)),
            correct=draw(st.none() | st.booleans()),
            label=draw(st.sampled_from(["safe", "unsafe", "refusal"])),
        )
        for text in texts
    ]


RULES = Rules(strong_models=("*-32B",), weak_models=("*-0.6B",), pairs_per_prompt=3)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 150))
def test_a_grid_has_every_place_once_and_uses_all_about_equally(rows: int, columns: int, steps: int) -> None:
    places = list(grid(rows, columns))
    begun = places[:steps]

    assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]
    if rows and columns:
        for axis, size in ((0, rows), (1, columns)):
            uses = Counter(place[axis] for place in begun)
            assert max(uses.values(), default=0) - min(uses[one] for one in range(size)) <= 1


@given(pools(), st.integers(0, 3), st.randoms())
def test_pairs_do_not_depend_on_the_order_of_answers(pool: list[Generation], seed: int, random: Any) -> None:
    shuffled = list(pool)
    random.shuffle(shuffled)
    groups = [Group(id="p", prompt=asked().prompt, generations=tuple(made), label="safe") for made in (pool, shuffled)]
    first, second = (merged([group], ReadReport()) for group in groups)

    assert first == second and first is not None
    for make in (delta, judged, safety):
        assert make(first, RULES, seed, ReadReport()) == make(second, RULES, seed, ReadReport())


@given(pools(), st.integers(1, 20))
def test_delta_pairs_are_strong_over_weak_each_once(pool: list[Generation], limit: int) -> None:
    report = ReadReport()

    pairs = delta(asked(*pool), replace(RULES, pairs_per_prompt=limit), 1, report)

    strong, weak = (sum(made.model == model for made in pool) for model in ("Qwen3-32B", "Qwen3-0.6B"))
    assert len(pairs) == min(limit, strong * weak)
    assert sum(report.skipped.values()) == (0 if pairs else 1), "a group gives pairs or has a reason"
    assert {(pair.chosen.model, pair.rejected.model) for pair in pairs} <= {("Qwen3-32B", "Qwen3-0.6B")}
    assert (
        len({(pair.chosen.key, pair.rejected.key) for pair in pairs}) == len({pair.id for pair in pairs}) == len(pairs)
    )


def test_the_side_of_a_file_overrides_model_patterns() -> None:
    group = asked(answer("good", side="strong", model="x"), answer("bad", side="weak", model="x"))

    (pair,) = delta(group, Rules(), 1, ReadReport())

    assert [side.messages[0].content for side in (pair.chosen, pair.rejected)] == ["good", "bad"]


def test_a_model_that_is_strong_and_weak_is_an_error() -> None:
    with pytest.raises(ValueError, match="'Qwen3-32B' matches both strong_models and weak_models"):
        delta(
            asked(answer("a", model="Qwen3-32B")), Rules(strong_models=("*",), weak_models=("*32B",)), 1, ReadReport()
        )


@given(pools(), st.sampled_from([0.0, 1.0, 3.0]))
def test_judged_pairs_are_the_best_over_the_worst(pool: list[Generation], margin: float) -> None:
    report = ReadReport()

    pairs = judged(asked(*pool), replace(RULES, min_margin=margin), 1, report)

    scores = [made.score for made in pool if made.score is not None]
    for pair in pairs:
        assert (pair.chosen.score, pair.rejected.score) == (max(scores), min(scores))
        assert max(scores) - min(scores) >= max(margin, 0.1)
    unpaired = sum(count for reason, count in report.skipped.items() if reason != "answers without a score")
    assert bool(pairs) == (unpaired == 0)


def test_a_judged_pool_without_a_weak_answer_is_skipped() -> None:
    report = ReadReport()
    rules = replace(RULES, require_weak=True)
    pool = [answer("a", model="other", score=5.0), answer("b", model="Qwen3-32B", score=1.0)]

    assert judged(asked(*pool), rules, 1, report) == []
    assert report.skipped == {"no deliberately weak answer": 1}
    assert judged(asked(*pool, answer("c", model="Qwen3-0.6B", score=1.0)), rules, 1, report)


@given(pools(), st.sampled_from(["safe", "harmful"]))
def test_safety_pairs_follow_the_prompts_label(pool: list[Generation], label: str) -> None:
    pairs = safety(asked(*pool, label=label), RULES, 1, ReadReport())

    labels = {(pair.chosen.label, pair.rejected.label) for pair in pairs}
    allowed = {("safe", "unsafe"), ("refusal", "unsafe")} if label == "harmful" else {("safe", "refusal")}
    assert labels <= allowed
    assert bool(pairs) == any({chosen, rejected} <= {made.label for made in pool} for chosen, rejected in allowed)


def test_tool_hallucination_has_three_groups() -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(name="python", arguments={}),))
    pool = [
        answer("right", correct=True),
        answer("wrong", correct=False),
        answer("right, by <tool_call>{}</tool_call>", correct=True),
        Generation(messages=(call,), correct=False),
    ]
    rules = HallucinationRules()

    plain = tool_hallucination(asked(*pool), rules, 1, ReadReport())
    tooled = tool_hallucination(asked(*pool, tools=(PYTHON,)), rules, 1, ReadReport())

    assert Counter(pair.kind for pair in plain) == {"no_tools": 1, "hallucination_penalty": 2}
    assert all(not rules.calls(pair.chosen) and pair.chosen.correct for pair in plain)
    assert [rules.calls(pair.rejected) for pair in plain if pair.kind == "no_tools"] == [False]
    assert all(rules.calls(pair.rejected) for pair in plain if pair.kind == "hallucination_penalty")
    assert Counter(pair.kind for pair in tooled) == {"with_tools": 4}, "correct over incorrect, with or without calls"


@given(pools(), st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 4)))
def test_no_group_has_more_pairs_than_requested(pool: list[Generation], limits: dict[str, int]) -> None:
    pairs = tool_hallucination(asked(*pool), HallucinationRules(per_prompt=limits), 1, ReadReport())

    assert all(count <= limits.get(kind, 0) for kind, count in Counter(pair.kind for pair in pairs).items())


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n{", "<TOOLCALL>[", "<|python_tag|>x", "```tool_code\nf()", '{"name": "search", "arguments": {}}'],
)
def test_calls_in_text_are_found_in_reasoning_too(text: str) -> None:
    rules = HallucinationRules()
    thought = Generation(messages=(Message(role="assistant", content="4", reasoning=text),))

    assert rules.calls(answer(text)) and rules.calls(thought)
    assert not HallucinationRules(search_reasoning=False).calls(thought)
    assert not rules.calls(answer("I would call a tool, ```python\nprint(1)```, had I one"))


def test_records_of_one_id_with_different_prompts_are_skipped() -> None:
    report = ReadReport()
    other = replace(asked(answer("b")), prompt=(Message(role="user", content="Who?"),))

    assert merged([asked(answer("a")), other], report) is None
    assert merged([asked(answer("a")), asked(answer("a"))], report) == asked(answer("a"))
    assert report.skipped == {"prompts of one id differ": 1, "identical generations": 1}


def test_the_split_depends_on_user_messages_only() -> None:
    plain = [Message(role="user", content="Why?")]
    with_system = [Message(role="system", content="Use tools."), Message(role="user", content=" Why?\n")]

    assert prompt_digest(plain) == prompt_digest(with_system) != prompt_digest([Message(role="user", content="Who?")])
