import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from nemo_ext.chat.sample import Message, Sample, openai_messages
from nemo_ext.chat.template import Template, last_turn, names, thinks
from nemo_ext.data.sft.masks import ChatEncoder, Encoded
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer

TEMPLATES = names()
load = lru_cache(Template.load)
encoder_of = lru_cache(maxsize=None)(ChatEncoder)


def encode(sample: Sample, template: Template, tokenizer: Any) -> tuple[Any, Any]:
    """Ids and mask of a sample as one text."""
    (encoded,) = encoder_of(template, tokenizer).encode(sample, turns="whole")
    return encoded.ids, encoded.mask


KINDS = ["byte_level", "split", "unigram"]
TokenizerOf = Callable[[str], HuggingFaceTokenizer]
SamplesOf = Callable[..., st.SearchStrategy[Sample]]

# Texts that begin and end with what would merge with a template's line breaks and tags.
EDGES = st.text(st.sampled_from("ab 1.\n<>/thinké大"), min_size=1, max_size=10)
INJECTIONS = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|im_", "</think>", "<tool_call>", "<unk>"]
    ),
    max_size=5,
).map("".join)


@lru_cache
def plain(tokenizer: HuggingFaceTokenizer) -> RustTokenizer:
    return RustTokenizer.from_file(str(tokenizer.path))


@lru_cache
def transformers_tokenizer(tokenizer: HuggingFaceTokenizer) -> Any:
    transformers = pytest.importorskip("transformers")
    described = RustTokenizer.from_file(str(tokenizer.path))
    described.post_processor = None  # its trimmed offsets make transformers leave out spaces at a trace's start
    return transformers.PreTrainedTokenizerFast(tokenizer_object=described)


def runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Places of the trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.mask, [0]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
@settings(max_examples=5)
def test_every_token_is_the_tokenizers_own_and_is_trained_on_as_its_text_is(
    kind: str, template: str, tokenizer_of: TokenizerOf, samples_of: SamplesOf, draw: st.DataObject
) -> None:
    """The ordinary tokenizer on each piece of text, trained or not, gives the same tokens one by one."""
    tokenizer, loaded = tokenizer_of(kind), load(template)
    own = plain(tokenizer)
    encoder = encoder_of(loaded, tokenizer)
    sample = draw.draw(samples_of(EDGES.filter(lambda text: "think>" not in text)))
    for encoded, rendered in zip(encoder.encode(sample), loaded.renderings(sample), strict=True):
        expected = []
        for number, (text, trained) in enumerate(rendered.segments):
            # Metaspace puts a space before the first piece of a text only.
            own_text = text if number == 0 or kind != "unigram" else "<|im_end|>" + text
            ids = own.encode(own_text, add_special_tokens=False).ids[len(own_text) > len(text) :]
            expected += [(token, int(trained)) for token in ids]
        assert list(zip(encoded.ids.tolist(), encoded.mask.tolist(), strict=True)) == expected
        assert encoded.ids.dtype == np.int32
        assert encoded.mask.dtype == np.uint8
        end_of_turn = own.token_to_id("<|eot_id|>" if template == "llama_nemotron" else "<|im_end|>")
        assert len(runs(encoded)) == len(rendered.trained) > 0
        assert all(encoded.ids[end - 1] == end_of_turn for _, end in runs(encoded))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
@settings(max_examples=5)
def test_the_prompt_has_the_same_ids_as_at_generation(
    kind: str, template: str, tokenizer_of: TokenizerOf, samples_of: SamplesOf, draw: st.DataObject
) -> None:
    loaded = load(template)
    encoder = encoder_of(loaded, tokenizer_of(kind))
    sample = draw.draw(samples_of(EDGES))
    encoded = encoder.encode(sample, turns="last")[0]
    answer = len(sample.messages) - len(last_turn(sample.messages))
    on = thinks(sample)
    if template == "nemotron3_nano":
        on = sample.messages[answer].reasoning is not None
    before = replace(sample, messages=sample.messages[:answer])
    prompt = loaded.render(before, thinking=on, add_generation_prompt=True, control=encoder.control)

    first = runs(encoded)[0][0]
    assert encoded.ids[:first].tolist() == encoder.tokens(replace(prompt, trained=())).ids.tolist()


@pytest.mark.parametrize("kind", ["byte_level", "split", "prefix_space"])
@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
@settings(max_examples=5)
def test_ids_and_mask_match_transformers(
    kind: str, template: str, tokenizer_of: TokenizerOf, samples_of: SamplesOf, draw: st.DataObject
) -> None:
    tokenizer, loaded = tokenizer_of(kind), load(template)
    theirs = transformers_tokenizer(tokenizer)
    sample = draw.draw(samples_of())
    expected = theirs.apply_chat_template(
        openai_messages(sample.messages),
        chat_template=loaded.source,
        tools=list(sample.tools) or None,
        enable_thinking=thinks(sample),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )

    ids, mask = encode(sample, loaded, tokenizer)

    if kind != "prefix_space":
        own, rendered = plain(tokenizer), loaded.render(sample)
        pieces = [token for text, _ in rendered.segments for token in own.encode(text, add_special_tokens=False).ids]
        if pieces != own.encode(rendered.text, add_special_tokens=False).ids:
            return  # transformers lets line breaks of a prompt and its answer merge
    assert ids.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("kind", [*KINDS, "prefix_space"])
@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
@settings(max_examples=5)
def test_data_never_become_control_tokens(
    kind: str, template: str, tokenizer_of: TokenizerOf, samples_of: SamplesOf, draw: st.DataObject
) -> None:
    tokenizer, loaded = tokenizer_of(kind), load(template)
    sample = draw.draw(samples_of(INJECTIONS))
    harmless = replace(
        sample,
        messages=tuple(
            replace(m, content="a" * bool(m.content), reasoning=None if m.reasoning is None else "a")
            for m in sample.messages
        ),
    )
    own = plain(tokenizer)
    control = [own.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>")]
    if template != "olmo3":  # it writes no such tags, so that they are text to it
        control += [own.token_to_id(name) for name in ("<think>", "</think>")]

    ids, mask = encode(sample, loaded, tokenizer)
    expected, _ = encode(harmless, loaded, tokenizer)

    assert [token for token in ids if token in control] == [token for token in expected if token in control]
    if kind in ("byte_level", "split"):
        assert own.decode(ids.tolist(), skip_special_tokens=False) == loaded.render(sample).text
        trained = own.decode(ids[mask == 1].tolist(), skip_special_tokens=False)
        assert trained == "".join(text for text, on in loaded.render(sample).segments if on)


def test_text_that_spells_a_control_token_merges_like_any_other_text(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("byte_level")
    end = plain(tokenizer).token_to_id("<|im_end|>")
    said = (Message(role="user", content="say <|im_end|> twice"), Message(role="assistant", content="<|im_end|>x"))

    ids, mask = encode(Sample(id="s", messages=said), load("olmo3"), tokenizer)

    assert (ids == end).sum() == 2  # one ends the user's message, one the assistant's
    assert ids[mask == 1][-1] == end
    assert (ids[mask == 1] == end).sum() == 1


def test_a_line_break_of_the_answer_does_not_merge_with_the_prompts(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("split")
    said = (Message(role="user", content="a"), Message(role="assistant", content="\nb"))
    sample = Sample(id="s", messages=said)
    own = plain(tokenizer)
    whole = load("llama_nemotron").render(sample).text

    ids, mask = encode(sample, load("llama_nemotron"), tokenizer)

    assert own.decode(ids[mask == 1].tolist(), skip_special_tokens=False) == "\nb<|eot_id|>"
    assert ids.tolist() != own.encode(whole, add_special_tokens=False).ids  # which has a token of all three


@pytest.mark.parametrize(
    "source",
    [
        "<|im_start|>ret{% generation %}urn self<|im_end|>{% endgeneration %}",
        "<|im_start|>{% generation %}ret{% endgeneration %}urn self<|im_end|>",
    ],
)
def test_without_cuts_a_token_across_a_boundary_is_not_trained_on(source: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("prefix_space")
    own = plain(tokenizer)
    encoder = ChatEncoder(Template("short", source), tokenizer)
    (encoded,) = encoder.encode(Sample(id="s", messages=(Message(role="user", content="a"),)))

    tokens = [own.id_to_token(token) for token in encoded.ids]
    both = next(number for number, token in enumerate(tokens) if "return" in token)
    assert encoded.ids.tolist() == own.encode("<|im_start|>return self<|im_end|>", add_special_tokens=False).ids
    assert not encoded.mask[both]
    after = "urn self" in source.partition("{% endgeneration %}")[0]
    assert encoded.mask[both + 1 :].tolist() == [int(after)] * (len(tokens) - both - 1)
    assert encoded.mask[:both].sum() == (0 if after else both - 1)  # the space that the tokenizer puts first


@pytest.mark.parametrize("template", TEMPLATES)
@given(draw=st.data())
@settings(max_examples=5)
def test_byte_tokenizer(template: str, samples_of: SamplesOf, draw: st.DataObject) -> None:
    sample = draw.draw(samples_of(EDGES))
    rendered = load(template).render(sample)

    ids, mask = encode(sample, load(template), ByteTokenizer())

    assert bytes(ids.tolist()).decode() == rendered.text
    trained = "".join(text for text, on in rendered.segments if on)
    assert bytes(ids[mask == 1].tolist()).decode() == trained


@pytest.mark.parametrize("kind", [*KINDS, "prefix_space", "byte"])
@given(text=st.text(st.sampled_from("ab é大\n"), min_size=1, max_size=40), budget=st.integers(1, 30))
@settings(max_examples=10)
def test_truncation_to_a_budget_of_tokens(kind: str, tokenizer_of: TokenizerOf, text: str, budget: int) -> None:
    tokenizer = ByteTokenizer() if kind == "byte" else tokenizer_of(kind)
    encoder = encoder_of(load("domyn"), tokenizer)

    def count(text: str) -> int:
        return len(encoder._ends(text)[0])

    cut = encoder.truncated(text, [budget, 1000]).get(budget)

    if cut is None:
        assert count(text) <= budget
    else:
        assert count(text) > budget
        assert text.startswith(cut)
        assert count(cut) <= budget if kind != "unigram" else len(cut) < len(text)


def test_a_template_without_an_end_of_turn_is_reported(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("byte_level")
    bare = Template("bare", "{% for message in messages %}{{ message.content }}\n{% endfor %}")

    assert all(ChatEncoder(load(name), tokenizer, allow_missing=True).ends_turns for name in TEMPLATES)
    assert not ChatEncoder(bare, tokenizer).ends_turns
    assert ChatEncoder(bare, ByteTokenizer()).ends_turns


def test_an_encoder_can_be_pickled(tool_chat: Sample, tokenizer_of: TokenizerOf) -> None:
    encoder = ChatEncoder(load("nemotron3_nano"), tokenizer_of("byte_level"))
    again = pickle.loads(pickle.dumps(encoder))

    for one, other in zip(encoder.encode(tool_chat), again.encode(tool_chat), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.mask.tolist() == other.mask.tolist()


def test_a_tokenizer_without_the_templates_tokens_is_refused(bpe_file: Path) -> None:
    tokenizer = HuggingFaceTokenizer(bpe_file)

    with pytest.raises(ValueError, match=r"has no token '<\|im_end\|>', which the chat template olmo3 writes"):
        ChatEncoder(load("olmo3"), tokenizer)
    said = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    (encoded,) = ChatEncoder(load("olmo3"), tokenizer, allow_missing=True).encode(Sample(id="s", messages=said))
    assert tokenizer.decode(encoded.ids[encoded.mask == 1]) == "b<|im_end|>"
