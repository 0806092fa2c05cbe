from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.curriculum import prompts as prompts_module
from nemo_ext.data.curriculum import records
from nemo_ext.data.curriculum.prompts import Prompts, key_of, read_prompts
from nemo_ext.data.curriculum.records import lines_of, parts_of
from nemo_ext.data.curriculum.settings import PromptKeys
from tests.json_lines import write_jsonl


def records_of(prompts: Prompts) -> list[bytes]:
    data = [path.read_bytes() for path in prompts.files]
    return [data[file][begin:end] for file, (begin, end) in zip(prompts.file, prompts.span, strict=True)]


def test_the_place_of_every_prompt(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = ['{"id": "x", "prompt": "größe", "domain": "math"}', '{"id": 2, "prompt": [{"role": "user"}]}']
    first.write_bytes(("\r\n".join(lines) + "\r\n\n").encode())
    second.write_text('{"id": "y", "prompt": "p", "domain": "code"}')  # no end of line

    prompts = read_prompts([first, second], PromptKeys())

    assert records_of(prompts) == [lines[0].encode(), lines[1].encode(), second.read_bytes()]
    assert prompts.key.tolist() == [key_of("x"), key_of("2"), key_of("y")]
    assert [prompts.domains[number] for number in prompts.domain] == ["math", "(none)", "code"]


@given(st.lists(st.text(max_size=30), max_size=30), st.integers(1, 80))
def test_every_line_is_in_one_part(tmp_path_factory: pytest.TempPathFactory, texts: list[str], part: int) -> None:
    path = tmp_path_factory.mktemp("parts") / "lines"
    path.write_bytes(b"".join(text.replace("\n", " ").encode() + b"\n" for text in texts))

    lines = [found for one in parts_of([path], part_bytes=part) for found in lines_of(one)]

    whole = path.read_bytes()
    kept = [line + b"\n" for line in whole.split(b"\n")[:-1] if line.strip()]
    assert [line for _, _, line in lines] == kept
    assert all(whole[offset : offset + len(line)] == line for _, offset, line in lines)
    assert all(whole[:offset].count(b"\n") == number - 1 for number, offset, _ in lines)


def test_identical_prompts_have_the_same_text_key(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"id": 1, "prompt": [{"role": "user", "content": "a"}]}\n'
        '{"id": 2, "prompt": [{"content":"\\u0061", "role":"user"}]}\n'
        '{"id": 3, "prompt": [{"role": "user", "content": "b"}]}\n'
    )

    text = read_prompts([path], PromptKeys()).text

    assert text[0] == text[1] != text[2]


def test_ids_by_line_and_by_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"input": {"q": f"{name}{n}"}} for n in range(3)]) for name in "ab"
    ]
    monkeypatch.setattr(records.parts_of, "__kwdefaults__", {"part_bytes": 25})

    by_line = read_prompts(files, PromptKeys(id="line", prompt="input.q", domain=None))
    by_text = read_prompts([*files, files[0]], PromptKeys(id="prompt", prompt="input.q", domain=None))

    assert by_line.key.tolist() == [key_of(str(number)) for number in range(6)]
    assert len(by_text) == 6 and by_text.report.skipped == {"id seen before": 3}
    assert by_line.domains == ("all",)


def test_malformed_and_repeated_records_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = '{"id": "a", "prompt": "first"}\n'
    path.write_text(good + "nonsense\n" + good.replace("first", "second") + '{"id": "", "prompt": "p"}\n{"id": 1.5}\n')

    prompts = read_prompts([path], PromptKeys(), max_bad_share=0.7)

    assert records_of(prompts) == [good.strip().encode()], "of two with one id the first"
    assert prompts.report.skipped == {"malformed": 3, "id seen before": 1}
    assert [place.split(": ")[0] for place in prompts.report.examples["malformed"]] == [
        f"{path}:{n}" for n in (2, 4, 5)
    ]
    with pytest.raises(ValueError, match="3 of 5 records are malformed"):
        read_prompts([path], PromptKeys())


def test_a_key_with_too_many_domains_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": n, "prompt": "p", "domain": f"d{n}"} for n in range(9)])
    monkeypatch.setattr(prompts_module, "MOST_DOMAINS", 9)
    assert len(read_prompts([path], PromptKeys()).domains) == 9

    monkeypatch.setattr(prompts_module, "MOST_DOMAINS", 8)

    with pytest.raises(ValueError, match=r"keys\.domain=domain has more than 8 values, such as 'd0' and 'd8'"):
        read_prompts([path], PromptKeys())
    monkeypatch.setattr(records, "PART_BYTES", 100)
    with pytest.raises(ValueError, match="more than 8 values"):
        read_prompts([path], PromptKeys())
