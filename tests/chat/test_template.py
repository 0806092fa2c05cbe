import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Message, Sample, ToolCall, openai_messages
from nemo_ext.chat.template import (
    FOLDER,
    ControlTokens,
    Rendered,
    Template,
    end_tokens,
    last_turn,
    names,
    split_turns,
    thinks,
)

TEMPLATES = names()
load = lru_cache(Template.load)
MODES = {"domyn": "thinking {}", "llama_nemotron": "detailed thinking {}"}


def marked(sample: Sample, template: str, **options: object) -> str:
    """The text with [[ and ]] around the trained spans."""
    segments = load(template).render(sample, **options).segments  # type: ignore[arg-type]
    return "".join(f"[[{text}]]" if trained else text for text, trained in segments)


def ask(answer: str = "4", reasoning: str | None = None, system: str = "") -> Sample:
    start = [Message(role="system", content=system)] if system else []
    messages = [
        *start,
        Message(role="user", content="2+2?"),
        Message(role="assistant", content=answer, reasoning=reasoning),
    ]
    return Sample(id="ask", messages=tuple(messages))


def test_every_family_has_a_template() -> None:
    assert names() == ["domyn", "llama_nemotron", "nemotron3_nano", "olmo3"]


def test_nano_keeps_reasoning_through_steps_and_drops_it_at_the_next_user_message(tool_chat: Sample) -> None:
    text = marked(tool_chat, "nemotron3_nano")

    _, _, talk = text.partition("answer directly.")
    assert talk == (
        "<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>Hi.<|im_end|>\n"
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[[Look it up.\n</think>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>]]\n"
        "<|im_start|>user\n<tool_response>\n3 C\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[[Now say it.\n</think>\nIt is 3 C.<|im_end|>]]\n"
    )


def test_nano_declares_tools_in_tags(tool_chat: Sample) -> None:
    text = marked(tool_chat, "nemotron3_nano")

    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert (
        "<tools>\n<function>\n<name>weather</name>\n<description>Tells the weather.</description>\n<parameters>\n"
        "<parameter>\n<name>city</name>\n<type>string</type>\n<description>Where.</description>\n</parameter>\n"
        '<parameter>\n<name>unit</name>\n<type>string</type>\n<enum>["C", "F"]</enum>\n'
        '<schema>{"type": "string", "enum": ["C", "F"], "default": "C"}</schema>\n</parameter>\n'
        '<required>["city"]</required>\n</parameters>\n</function>\n</tools>'
    ) in text


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        (
            "nemotron3_nano",
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n[[Add.\n</think>\n4<|im_end|>]]\n",
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>[[4<|im_end|>]]\n",
        ),
        (
            "domyn",
            "<|im_start|>system\nthinking on<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n[[Add.\n</think>\n\n4<|im_end|>]]\n",
            "<|im_start|>system\nthinking off<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n[[4<|im_end|>]]\n",
        ),
        (
            "llama_nemotron",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ndetailed thinking on<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[<think>\nAdd.\n</think>\n\n4<|eot_id|>]]",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ndetailed thinking off<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[4<|eot_id|>]]",
        ),
        (
            "olmo3",
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>[[Add.</think>4<|im_end|>]]\n",
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n",
        ),
    ],
)
def test_both_modes(template: str, on: str, off: str) -> None:
    assert marked(ask(reasoning="Add."), template) == on
    assert marked(ask(), template) == off


def test_olmo_calls_functions_as_code(tool_chat: Sample) -> None:
    text = marked(tool_chat, "olmo3")

    assert text.startswith('<|im_start|>system\nBe brief. <functions>[{"name": "weather"')
    assert '[[Look it up.</think><function_calls>weather(city="Oslo", days=2)</function_calls><|im_end|>]]\n' in text
    assert "<|im_start|>environment\n3 C<|im_end|>\n" in text


@pytest.mark.parametrize("template", sorted(MODES))
@pytest.mark.parametrize("given", ["on", "off"])
def test_a_toggle_in_the_data_is_not_repeated(template: str, given: str) -> None:
    toggle = MODES[template]
    text = marked(ask(reasoning="Add.", system=f"{toggle.format(given)}\n\nBe brief."), template)

    assert text.count(toggle.format("on")) == 1
    assert toggle.format("off") not in text
    assert f"{toggle.format('on')}\n\nBe brief." in text
    assert "thinking online is fine" in marked(ask(system="thinking online is fine"), template)


@pytest.mark.parametrize("template", sorted(MODES))
def test_the_toggle_may_be_in_the_system_message_only(template: str) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    toggle = MODES[template].format("off")
    messages = [{"role": "system", "content": toggle}, {"role": "user", "content": "2+2?"}]
    (text,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=load(template).source, add_generation_prompt=True
    )

    assert text.count(toggle) == 1
    assert not text.endswith("<think>\n")


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_text_and_mask_match_transformers(
    template: str, samples_of: Callable[..., st.SearchStrategy[Sample]], draw: st.DataObject
) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    sample = draw.draw(samples_of())
    ours = load(template).render(sample)
    (text,), (spans,) = chat_template_utils.render_jinja_template(
        [openai_messages(sample.messages)],
        tools=list(sample.tools) or None,
        chat_template=load(template).source,
        return_assistant_tokens_mask=True,
        enable_thinking=thinks(sample),
    )

    assert ours.text == text
    assert ours.trained == tuple(span for span in spans if span[0] < span[1])


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_each_answer_is_trained_on_once_and_after_the_prompt_that_generates_it(
    template: str, samples_of: Callable[..., st.SearchStrategy[Sample]], draw: st.DataObject
) -> None:
    sample = draw.draw(samples_of())
    loaded = load(template)
    pieces = split_turns(sample)
    answers = []
    for piece, rendered in zip(pieces, loaded.renderings(sample), strict=True):
        turns = piece.messages if len(pieces) == 1 else last_turn(piece.messages)
        first = len(piece.messages) - len(turns)
        places = [first + n for n, message in enumerate(turns) if message.role == "assistant"]
        assert len(rendered.trained) == len(places)
        for (start, end), place in zip(rendered.trained, places, strict=True):
            message = piece.messages[place]
            # Nano's mode is in the generation prompt of each step, the other templates' in the system message.
            on = message.reasoning is not None if template == "nemotron3_nano" else thinks(piece)
            prompt = loaded.render(
                replace(piece, messages=piece.messages[:place]), thinking=on, add_generation_prompt=True
            )
            assert rendered.text[:start] == prompt.text
            assert message.content in rendered.text[start:end]
            assert (message.reasoning or "") in rendered.text[start:end]
            assert re.search(r"<\|(im_end|eot_id)\|>$", rendered.text[start:end])
            answers.append(message)
    assert answers == [message for message in sample.messages if message.role == "assistant"]


def test_turns_split_last_and_whole(tool_chat: Sample) -> None:
    template = Template.load("domyn")

    split, last, whole = (template.renderings(tool_chat, turns=turns) for turns in ("split", "last", "whole"))  # type: ignore[arg-type]

    assert [len(text.trained) for text in split] == [1, 2]
    assert "A greeting." in split[0].text
    assert "A greeting." not in split[1].text
    assert last == whole == split[1:]
    no_reasoning = replace(tool_chat, messages=tuple(replace(m, reasoning=None) for m in tool_chat.messages))
    assert [len(text.trained) for text in template.renderings(no_reasoning)] == [3]
    assert [len(text.trained) for text in template.renderings(no_reasoning, turns="last")] == [2]


def test_a_conversation_is_split_into_its_turns(tool_chat: Sample) -> None:
    start, answered = tool_chat.messages, Message(role="assistant", content="Bye.")
    sample = replace(tool_chat, messages=(*start, Message(role="user", content="Thanks."), answered))

    pieces = split_turns(sample)

    assert [piece.id for piece in pieces] == ["tools#1", "tools#2", "tools#3"]
    assert [piece.messages for piece in pieces] == [start[:3], start, sample.messages]
    assert [piece.thinking for piece in pieces] == [True, True, False]
    assert split_turns(replace(sample, messages=(start[0], start[1], answered))) == [
        replace(sample, messages=(start[0], start[1], answered))
    ]


def test_a_template_that_keeps_reasoning_is_not_split(tool_chat: Sample) -> None:
    source = (
        "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['reasoning_content'] }}{{ m['content'] }}{{ m['tool_calls'] }}{% endgeneration %}{% else %}"
        "{{ m['content'] }}{% endif %}\n{% endfor %}{{ tools }}"
    )
    tool_chat = replace(tool_chat, messages=tuple(replace(m, tool_calls=()) for m in tool_chat.messages))
    (text,) = Template("keeps", source).renderings(tool_chat)

    assert [text for text, trained in text.segments if trained] == [
        "A greeting.Hi.",
        "Look it up.",
        "Now say it.It is 3 C.",
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_without_marks_the_text_after_each_prompt_is_trained_on(
    template: str, samples_of: Callable[..., st.SearchStrategy[Sample]], draw: st.DataObject
) -> None:
    sample = draw.draw(samples_of())
    assert unmarked(template).renderings(sample, turns="last") == load(template).renderings(sample, turns="last")
    assert unmarked(template).renderings(sample) == load(template).renderings(sample)


@lru_cache
def unmarked(template: str) -> Template:
    made = Template("unmarked", re.sub(r"{%-? (end)?generation -?%}", "", load(template).source))
    assert not made.marks_generation
    return made


def test_a_template_without_reasoning_is_refused() -> None:
    source = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"

    (text,) = Template("simple", source).renderings(ask())
    assert text.segments == [("user: 2+2?\nassistant: ", False), ("4", True), ("\n", False)]
    with pytest.raises(ValueError, match="chat template simple omits reasoning_content"):
        Template("simple", source).renderings(ask(reasoning="Add."))
    with pytest.raises(ValueError, match="does not render message 1 after its prompt"):
        Template("other", source.replace("}assistant: ", "}model: ")).renderings(ask())


def rendered_by_transformers(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=load(template).source, tools=None, **variables
    )
    return str(text)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_file_renders_messages_as_clients_send_them(template: str, tool_chat: Sample) -> None:
    normal = openai_messages(tool_chat.messages)
    sent = json.loads(json.dumps(normal))
    for message in sent:
        if message["content"]:
            half = len(message["content"]) // 2
            parts = (message["content"][:half], message["content"][half:])
            message["content"] = [{"type": "text", "text": part} for part in parts]
        else:
            message["content"] = None
        message["tool_calls"] = message.get("tool_calls")
    assert any(message["content"] is None for message in sent)

    text = rendered_by_transformers(template, normal)

    assert rendered_by_transformers(template, sent, enable_thinking=None) == text
    assert rendered_by_transformers(template, sent, enable_thinking=True) == text
    sent[-2]["content"] = None  # a tool that says nothing
    assert "None" not in rendered_by_transformers(template, sent)
    del sent[-2]["content"]
    assert "None" not in rendered_by_transformers(template, sent)
    for content, said in (
        ([{"type": "image_url"}], "part of type image_url"),
        (3, "not text: 3"),
        ({"a": 1}, "not text"),
    ):
        with pytest.raises(jinja2.TemplateError, match=said):
            rendered_by_transformers(template, [{"role": "user", "content": content}])


@pytest.mark.parametrize("template", TEMPLATES)
def test_arguments_as_json_text_are_written_verbatim_or_refused(template: str, tool_chat: Sample) -> None:
    normal = openai_messages(tool_chat.messages)
    sent = openai_messages(tool_chat.messages, arguments_as_text=True)
    flat = json.loads(json.dumps(normal))
    for message in flat:
        message["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]

    text = rendered_by_transformers(template, normal)

    assert rendered_by_transformers(template, flat) == text
    if template in ("domyn", "llama_nemotron"):
        assert rendered_by_transformers(template, sent) == text
    else:
        with pytest.raises(jinja2.TemplateError, match="arguments of weather are JSON text: decode it first"):
            rendered_by_transformers(template, sent)
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = ""
    assert "weather" in rendered_by_transformers(template, sent)


CHAT = tuple(Message(role=role, content=f"{role} {n}") for n in range(3) for role in ("user", "assistant"))
FROM_ELSEWHERE = ["cohere", "gemma3", "gptoss", "llama3", "qwen2_5", "qwen3", "qwen3_6"]


def from_elsewhere(name: str) -> Template:
    """A published template, as packaged by TRL; most of them have no marks."""
    (folder,) = getattr(find_spec("trl"), "submodule_search_locations", None) or [pytest.skip("no trl")]
    source = (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()
    return Template(name, source, {"bos_token": "<s>", "eos_token": "</s>"})


def trained(texts: list[Rendered]) -> list[str]:
    return [segment for text in texts for segment, on in text.segments if on]


@pytest.mark.parametrize("name", FROM_ELSEWHERE)
def test_every_answer_without_reasoning_is_trained_on_once(name: str) -> None:
    template = from_elsewhere(name)
    assert not template.marks_generation

    texts = trained(template.renderings(Sample(id="s", messages=CHAT)))

    assert len(texts) == 3
    for number, text in enumerate(texts):
        assert f"assistant {number}" in text and re.search("<[^<]*>$", text) and "user" not in text


def test_an_answer_that_is_rendered_differently_later_gets_a_separate_text() -> None:
    template, sample = from_elsewhere("qwen3"), Sample(id="s", messages=CHAT)

    texts = template.renderings(sample)

    assert [text.text.count("assistant ") for text in texts] == [1, 2, 3]
    for text in texts:
        assert text.segments[-3][0].endswith("assistant\n<think>\n\n</think>\n\n")
    assert trained(template.renderings(sample, turns="last")) == ["assistant 2<|im_end|>"]
    with pytest.raises(ValueError, match=r"does not render message 1 after its prompt.* turns=split"):
        template.renderings(sample, turns="whole")


@pytest.mark.parametrize("template", ["domyn", "olmo3"])
def test_mode_on_without_reasoning_in_the_sample_keeps_all_answers(template: str) -> None:
    sample = Sample(id="s", messages=CHAT, thinking=True)

    texts = load(template).renderings(sample)

    assert [text.thinking for text in texts] == [True] * 3
    assert [number for number, text in enumerate(trained(texts)) if "</think>" in text and f"nt {number}<" in text] == [
        0,
        1,
        2,
    ]
    assert unmarked(template).renderings(sample) == texts


def test_a_template_that_writes_arguments_verbatim_gets_json_text(tool_chat: Sample) -> None:
    tool_chat = replace(tool_chat, tools=(), messages=tuple(replace(m, reasoning=None) for m in tool_chat.messages))
    plain = Template(
        "plain", "{% for m in messages %}{% for c in m['tool_calls'] %}{{ c['function'] }}{% endfor %}{% endfor %}"
    )
    raw = Template("raw", plain.source.replace("c['function']", "c['function']['arguments']"))

    assert from_elsewhere("deepseekv3").takes_argument_text and raw.takes_argument_text
    assert raw.render(tool_chat).text == '{"city": "Oslo", "days": 2}'
    assert '\n```json\n{"city": "Oslo", "days": 2}\n```' in from_elsewhere("deepseekv3").render(tool_chat).text
    others = [*map(load, TEMPLATES), *map(from_elsewhere, ("llama3_2", "qwen3", "gemma4", "gptoss"))]
    assert not any(template.takes_argument_text for template in others)


def test_answers_of_tools_have_the_tools_names() -> None:
    calls = tuple(ToolCall(name=name, id=name) for name in ("first", "second"))
    answers = [Message(role="tool", content=f"of {call.name}", tool_call_id=call.id) for call in calls]
    asked = (Message(role="user", content="a"), Message(role="assistant", tool_calls=calls))
    source = "{% for m in messages %}{{ m['name'] }}:{{ m['content'] }} {% endfor %}"

    text = Template("names", source).render(Sample(id="s", messages=(*asked, *answers))).text
    unnamed = [replace(answer, tool_call_id=None) for answer in answers]

    assert text == ":a : first:of first second:of second "
    assert Template("names", source).render(Sample(id="s", messages=(*asked, *unnamed))).text == text


def test_a_template_that_keeps_reasoning_accepts_a_last_turn_without_reasoning() -> None:
    template, turns = from_elsewhere("qwen3_8"), list(CHAT[:4])
    turns[1] = replace(turns[1], reasoning="So.")
    assert not template.drops_reasoning

    texts = trained(template.renderings(Sample(id="s", messages=tuple(turns))))

    assert texts == ["So.\n</think>\n\nassistant 0<|im_end|>", "assistant 1<|im_end|>"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(
    ("source", "left_out"),
    [
        (CHATML, "the tool calls of message 2"),
        (CHATML.replace("<|im_end|>{% endgen", "{{ m['tool_calls'] }}<|im_end|>{% endgen"), "the declared tools"),
        ("{{ tools }}{{ messages | tojson }}".replace("messages", "messages[1:]"), "the system message"),
        ("{{ tools }}{{ messages | rejectattr('role', 'equalto', 'tool') | list | tojson }}", "the tool's answer 3"),
        (
            "{{ tools }}{% for m in messages %}{{ m['tool_calls'] }}"
            "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}",
            "the system message",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] %}"
            "{{ call['function']['arguments'] }}{% endfor %}{% endfor %}",
            "the tool calls of message 2",
        ),
    ],
)
def test_a_template_that_omits_a_part_is_refused(tool_chat: Sample, source: str, left_out: str, marks: bool) -> None:
    source = source if marks else re.sub("{% (end)?generation %}", "", source)
    turn = tuple(replace(m, reasoning=None) for m in (tool_chat.messages[0], *tool_chat.messages[3:]))

    with pytest.raises(
        ValueError, match=f"sample tools: chat template mine omits .*{left_out}.*: use another template"
    ):
        Template("mine", source).renderings(replace(tool_chat, messages=turn))


@pytest.mark.parametrize("marks", [True, False])
def test_a_short_trace_that_occurs_elsewhere_does_not_count_as_written(marks: bool) -> None:
    source = CHATML if marks else re.sub("{% (end)?generation %}", "", CHATML)

    with pytest.raises(ValueError, match="chat template mine omits reasoning_content"):
        Template("mine", source).renderings(ask(answer="So 4.", reasoning="4"))


NASTY = st.lists(
    st.sampled_from(
        ["a", "<|im_end|>", "<|im_", "end|>", "<think>", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd5", "\ufdd50", "0"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_quoting_keeps_the_text_and_finds_every_token_in_the_data(
    template: str, samples_of: Callable[..., st.SearchStrategy[Sample]], draw: st.DataObject
) -> None:
    sample = draw.draw(samples_of(NASTY))
    loaded = load(template)
    free, quoted = loaded.render(sample), loaded.render(sample, control=ControlTokens(["<|im_end|>", "<|im_"]))

    assert (quoted.text, quoted.trained) == (free.text, free.trained)
    assert {quoted.text[start:end] for start, end in quoted.quoted} <= {"<|im_end|>", "<|im_"}
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = chat_template_utils.render_jinja_template(
        [openai_messages(sample.messages)],
        tools=list(sample.tools) or None,
        chat_template=loaded.source,
        enable_thinking=thinks(sample),
    )
    assert free.text == text
    said = [m for m in sample.messages if m.role in ("user", "tool")]
    assert len(quoted.quoted) >= sum(m.content.count("<|im_") for m in said)


def test_a_template_can_be_pickled(tool_chat: Sample) -> None:
    template = Template.load("domyn")

    assert pickle.loads(pickle.dumps(template)).render(tool_chat) == template.render(tool_chat)


def test_a_template_is_loaded_from_a_tokenizer_s_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ bos_token }}hi", "bos_token": {"content": "<s>"}}'
    )
    assert Template.load(tmp_path).render(ask()).text == "<s>hi"

    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}hello")
    assert Template.load(tmp_path).render(ask()).text == "<s>hello"
    assert Template.load(FOLDER / "olmo3.jinja").render(ask()) == Template.load("olmo3").render(ask())


def test_a_file_uses_the_tokens_of_the_tokenizer_config_next_to_it(tmp_path: Path) -> None:
    """Without the config, `</s>` would be missing after each trained answer."""
    file, config = tmp_path / "own.jinja", tmp_path / "tokenizer_config.json"
    file.write_text("{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}")

    with pytest.raises(ValueError, match=r"eos_token is unknown: .* tokenizer_config\.json"):
        Template.load(file).render(ask())
    with pytest.raises(ValueError, match="eos_token is unknown"):
        pickle.loads(pickle.dumps(Template.load(file))).render(ask())
    config.write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": None}))
    assert Template.load(file).render(ask()).text == "2+2?</s>4</s>"


def test_invalid_templates_and_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'olmo3'"):
        Template.load("olmo_3")
    with pytest.raises(ValueError, match=r"neither chat_template\.jinja nor a chat_template"):
        Template.load(tmp_path)
    with pytest.raises(ValueError, match="chat template bad is not valid Jinja in line 2"):
        Template("bad", "a\n{% if %}")
    with pytest.raises(ValueError, match="sample ask: thinking is off, but its last turn has reasoning"):
        Template.load("domyn").render(replace(ask(reasoning="Add."), thinking=False))
    late = replace(ask(), messages=(*ask().messages, Message(role="system", content="x")))
    with pytest.raises(ValueError, match=r"sample ask: chat template domyn cannot render it .message 2 has the role"):
        Template.load("domyn").render(late)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", r"Range too big.*\); fix the template"),
        ("{{ range(10**9) | list }}", r"Range too big.*\); fix the template"),
        ("{{ 1 % (messages | length - messages | length) }}", r"zero\); fix the template"),
    ],
)
def test_a_template_with_a_huge_range_is_refused_at_once(source: str, said: str) -> None:
    sample = Sample(source="made", id="a", messages=(Message(role="user", content="question"),))

    with pytest.raises(ValueError, match=f"sample a: chat template mine .*{said}"):
        Template("mine", source).render(sample)


def test_the_check_for_omitted_parts_passes_on_only_the_errors_of_replaced_texts() -> None:
    parser = Template("parser", "{% if messages[0].content != '2+2?' %}{{ raise_exception('no sum') }}{% endif %}")

    parser.check_complete(ask(), thinking=False)
    with pytest.raises(ValueError, match=r"sample ask: .*no sum"):
        parser.check_complete(ask(system="Be brief."), thinking=False)
    with pytest.raises(ValueError, match="thinking is off, but its last turn has reasoning"):
        Template.load("domyn").check_complete(ask(reasoning="Add."), thinking=False)


def test_the_last_turn_starts_after_the_last_user_message() -> None:
    messages = [Message(role=role, content=f"{role} {turn}") for turn in (1, 2) for role in ("user", "assistant")]

    assert [message.content for message in last_turn(messages)] == ["assistant 2"]
    assert last_turn(messages[-1:]) == messages[-1:]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}### end"
REFUSES = "{{ raise_exception('wants a system message') }}"


@pytest.mark.parametrize(
    ("template", "listed", "ends"),
    [
        (CHATML, None, {"<|endoftext|>", "<|im_end|>"}),
        (CHATML, "<|eot_id|>", {"<|endoftext|>", "<|im_end|>", "<|eot_id|>"}),
        (CHATML, ["<|eot_id|>", "<|eom_id|>"], {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"}),
        (CHATML.replace("<|im_end|>", " <|eot_id|>"), [], {"<|endoftext|>", "<|eot_id|>"}),
        (PLAIN, None, {"<|endoftext|>"}),
        (REFUSES, None, {"<|endoftext|>"}),
        (None, ["<|eot_id|>"], {"<|endoftext|>", "<|eot_id|>"}),
    ],
)
def test_tokens_that_end_an_answer(template: str | None, listed: str | list[str] | None, ends: set[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>")
    # Some tokenizers have the token of a turn's end without calling it special.
    tokenizer.add_tokens([AddedToken(word, special=False) for word in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")])
    tokenizer.chat_template = template
    generation = GenerationConfig(eos_token_id=None if listed is None else tokenizer.convert_tokens_to_ids(listed))

    found = end_tokens(tokenizer, generation=generation)

    assert set(tokenizer.convert_ids_to_tokens(sorted(found))) == ends
    if template is not None:
        assert found == end_tokens(tokenizer, Template("other", template), generation)


def test_the_closing_text_of_a_turn() -> None:
    ends = {name: load(name).closing.strip() for name in TEMPLATES}

    assert ends == dict.fromkeys(TEMPLATES, "<|im_end|>") | {"llama_nemotron": "<|eot_id|>"}


PARTS_ONLY = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == "text" %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""


def test_a_template_that_writes_no_text_has_no_closing() -> None:
    assert Template("parts", PARTS_ONLY).closing == ""


def test_a_template_that_refuses_a_sample_names_it() -> None:
    once = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    template = Template("one", once + CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

    (text,) = template.renderings(ask())

    assert trained([text]) == ["4<|im_end|>"]
    with pytest.raises(ValueError, match=r"sample s: .*one turn"):
        template.renderings(Sample(id="s", messages=CHAT))
