import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Message, Sample, openai_messages
from nemo_ext.chat.template import (
    FOLDER,
    ControlTokens,
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
    """The text with [[ and ]] around what is trained on."""
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
def test_a_toggle_in_the_data_does_not_stand_there_twice(template: str, given: str) -> None:
    toggle = MODES[template]
    text = marked(ask(reasoning="Add.", system=f"{toggle.format(given)}\n\nBe brief."), template)

    assert text.count(toggle.format("on")) == 1
    assert toggle.format("off") not in text
    assert f"{toggle.format('on')}\n\nBe brief." in text
    assert "thinking online is fine" in marked(ask(system="thinking online is fine"), template)


@pytest.mark.parametrize("template", sorted(MODES))
def test_a_server_may_give_the_toggle_in_the_system_message_alone(template: str) -> None:
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
def test_text_and_marks_are_those_of_transformers(
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
            # Nano's mode shows in the prompt of each step, the others' in the system message.
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


def test_ways_to_train_on_several_turns(tool_chat: Sample) -> None:
    template = Template.load("domyn")

    split, last, whole = (template.renderings(tool_chat, turns=turns) for turns in ("split", "last", "whole"))  # type: ignore[arg-type]

    assert [len(text.trained) for text in split] == [1, 2]
    assert "A greeting." in split[0].text
    assert "A greeting." not in split[1].text
    assert last == whole == split[1:]
    no_reasoning = replace(tool_chat, messages=tuple(replace(m, reasoning=None) for m in tool_chat.messages))
    assert [len(text.trained) for text in template.renderings(no_reasoning)] == [3]
    assert [len(text.trained) for text in template.renderings(no_reasoning, turns="last")] == [2]


def test_a_conversation_is_divided_into_its_turns(tool_chat: Sample) -> None:
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
        "{{ m['reasoning_content'] }}{{ m['content'] }}{% endgeneration %}{% else %}"
        "{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    (text,) = Template("keeps", source).renderings(tool_chat)

    assert [text for text, trained in text.segments if trained] == [
        "A greeting.Hi.",
        "Look it up.",
        "Now say it.It is 3 C.",
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_without_marks_the_prompts_say_what_is_trained_on(
    template: str, samples_of: Callable[..., st.SearchStrategy[Sample]], draw: st.DataObject
) -> None:
    sample = draw.draw(samples_of())
    assert unmarked(template).renderings(sample, turns="last") == load(template).renderings(sample, turns="last")
    if any(message.reasoning is not None for message in sample.messages):
        assert unmarked(template).renderings(sample) == load(template).renderings(sample)


@lru_cache
def unmarked(template: str) -> Template:
    made = Template("unmarked", re.sub(r"{%-? (end)?generation -?%}", "", load(template).source))
    assert not made.marks_generation
    return made


def test_a_template_that_does_not_know_reasoning_is_refused() -> None:
    source = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"

    (text,) = Template("simple", source).renderings(ask())
    assert text.segments == [("user: 2+2?\nassistant: ", False), ("4", True), ("\n", False)]
    with pytest.raises(ValueError, match="chat template simple leaves out reasoning_content"):
        Template("simple", source).renderings(ask(reasoning="Add."))
    with pytest.raises(ValueError, match="begins message 1 otherwise than its prompt ends"):
        Template("other", source.replace("}assistant: ", "}model: ")).renderings(ask())


NASTY = st.lists(
    st.sampled_from(
        ["a", "<|im_end|>", "<|im_", "end|>", "<think>", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd5", "\ufdd50", "0"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
def test_quoting_changes_no_text_and_finds_all_that_data_spell(
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


def test_a_template_survives_pickling(tool_chat: Sample) -> None:
    template = Template.load("domyn")

    assert pickle.loads(pickle.dumps(template)).render(tool_chat) == template.render(tool_chat)


def test_the_folder_of_a_tokenizer_gives_its_own_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ bos_token }}hi", "bos_token": {"content": "<s>"}}'
    )
    assert Template.load(tmp_path).render(ask()).text == "<s>hi"

    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}hello")
    assert Template.load(tmp_path).render(ask()).text == "<s>hello"
    assert Template.load(FOLDER / "olmo3.jinja").render(ask()) == Template.load("olmo3").render(ask())


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'olmo3'"):
        Template.load("olmo_3")
    with pytest.raises(ValueError, match="no chat_template"):
        Template.load(tmp_path)
    with pytest.raises(ValueError, match="chat template bad, line 2"):
        Template("bad", "a\n{% if %}")
    with pytest.raises(ValueError, match="sample ask: thinking is off, but its last turn has reasoning"):
        Template.load("domyn").render(replace(ask(reasoning="Add."), thinking=False))
    late = replace(ask(), messages=(*ask().messages, Message(role="system", content="x")))
    with pytest.raises(ValueError, match="sample ask: chat template domyn: message 2 has the role system"):
        Template.load("domyn").render(late)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "Range too big.*: mend the template"),
        ("{{ range(10**9) | list }}", "Range too big.*: mend the template"),
        ("{{ 1 % (messages | length - messages | length) }}", "zero: mend the template"),
    ],
)
def test_a_template_that_counts_too_far_is_refused_at_once(source: str, said: str) -> None:
    sample = Sample(source="made", id="a", messages=(Message(role="user", content="question"),))

    with pytest.raises(ValueError, match=f"sample a: chat template mine: .*{said}"):
        Template("mine", source).render(sample)


def test_the_last_turn_begins_after_the_last_user_message() -> None:
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


def test_what_ends_a_turn() -> None:
    ends = {name: load(name).closing.strip() for name in TEMPLATES}

    assert ends == dict.fromkeys(TEMPLATES, "<|im_end|>") | {"llama_nemotron": "<|eot_id|>"}
