import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.sft.filters.screen import load_filters
from nemo_ext.data.sft.sources import Located
from nemo_ext.data.text.documents import ReadReport


def test_the_first_reason_is_counted_with_its_place(chat: Callable[..., Sample]) -> None:
    screen = load_filters({"narrative": {}, "structural": {}, "length": {"max_characters": 60}, "repetition": None})
    screen.check()
    report = ReadReport()
    samples = [chat("q"), chat("q", ""), chat("q", "our values" * 9), chat("q", "our values"), chat("q", "long" * 20)]

    screen = pickle.loads(pickle.dumps(screen))
    kept = [screen.kept(Located(sample, f"a:{line}"), report) for line, sample in enumerate(samples, 1)]

    assert [texts is not None for texts in kept] == [True, False, False, False, False]
    assert kept[0] is not None
    assert kept[0].sample is samples[0]
    assert report.records == 5
    assert report.skipped == {"structural/empty-assistant": 1, "length/too-long": 2, "narrative/narrative-answer": 1}
    assert report.examples["structural/empty-assistant"] == ["a:2 (1): messages[1]"]
    assert report.examples["narrative/narrative-answer"] == ["a:4 (1): 'our values'"]


def test_a_typo_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="filters: unknown filter 'lenght'; did you mean 'length'"):
        load_filters({"lenght": {}})
    with pytest.raises(ValueError, match=r"filters.length: unknown key 'max_token': did you mean 'max_tokens'"):
        load_filters({"length": {"max_token": 1}})
    with pytest.raises(ValueError, match=r"filters.repetition.window_times=1: input should be greater"):
        load_filters({"repetition": {"window_times": 1}})
    with pytest.raises(ValueError, match=r"filters\.length: max_tokens requires a tokenizer"):
        load_filters({"length": {"max_tokens": 9}})


def called(*arguments: str) -> Sample:
    """One call for each argument, with the tool's answer."""
    messages = [Message(role="user", content="please do so")]
    for text in arguments:
        call = ToolCall(name="write", arguments={"text": text})
        messages += [Message(role="assistant", tool_calls=(call,)), Message(role="tool", content="it is our nation")]
    return Sample(id="1", messages=(*messages, Message(role="assistant", content="Done.")))


def test_calls_are_judged_and_tools_answers_are_not(tmp_path: Path, prose: Callable[[int, int], str]) -> None:
    (tmp_path / "test.txt").write_text(prose(20, 1) + "\n" + prose(7, 2))
    rules = {"narrative": {}, "repetition": {}, "language": {"languages": "en"}}
    screen = load_filters(
        rules | {"decontamination": {"test_sets": [{"name": "t", "path": str(tmp_path / "test.txt")}]}}
    )
    phrase = prose(12, 3)

    def reasons(*arguments: str) -> dict[str, int]:
        report = ReadReport()
        screen.kept(Located(called(*arguments), "a:1"), report)
        return report.skipped

    assert reasons("It is said.") == {}
    assert reasons("as our nation says") == {"narrative/narrative-answer": 1}
    assert reasons(f"so {prose(20, 1)}") == {"decontamination/benchmark": 1}
    assert reasons(f"so {prose(7, 2)} then") == {"decontamination/benchmark": 1}
    assert reasons(" ".join([phrase] * 7)) == {"repetition/repeated-in-window": 1}
    assert reasons("=" * 500) == {"repetition/repeated-characters": 1}
    assert reasons(*[f"{phrase} {number}" for number in range(25)]) == {}, "calls of one tool begin alike"
    assert reasons("Das ist ein ganz gewöhnlicher Satz in deutscher Sprache, und er ist lang genug dafür.") == {}
