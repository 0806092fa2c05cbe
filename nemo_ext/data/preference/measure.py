"""Lengths of a pair, and its texts where a chat template renders it."""

import json
from dataclasses import replace

from nemo_ext.chat.sample import Message, Sample, has_reasoning, spoken
from nemo_ext.chat.template import Template
from nemo_ext.data.preference.filters import Lengths
from nemo_ext.data.preference.group import Pair
from nemo_ext.data.text.tokenizers import Tokenizer

Texts = tuple[str, str, str]


def texts_of(pair: Pair, template: Template) -> Texts:
    """Texts of a pair; raises as `rendered_pair`."""
    asked = Sample(id=pair.id, messages=pair.group.prompt, tools=pair.group.tools)
    return rendered_pair(asked, pair.chosen.messages, pair.rejected.messages, template)


def rendered_pair(
    asked: Sample, chosen: tuple[Message, ...], rejected: tuple[Message, ...], template: Template
) -> Texts:
    """Render the prompt with the beginning of the answer, and both answers after it up to the end-of-turn token.

    The mode is the prompt's own; where that is None, thinking is on if an answer has reasoning.

    Raises:
        ValueError: the template refuses a side, leaves something out, or begins an answer not as its prompt ends.
    """
    thinking = asked.thinking
    if thinking is None:
        thinking = has_reasoning(chosen) or has_reasoning(rejected)
    prompt = template.render(asked, thinking=thinking, add_generation_prompt=True).text
    answers = []
    for side in (chosen, rejected):
        answered = replace(asked, messages=asked.messages + side)
        template.check_complete(answered, thinking=thinking)
        whole = template.render(answered, thinking=thinking).text
        if not whole.startswith(prompt):
            raise ValueError(f"chat template {template.name} begins an answer otherwise than its prompt ends")
        answers.append(whole[len(prompt) :].rstrip("\n"))  # the line break after an answer belongs to what follows it
    return prompt, answers[0], answers[1]


def lengths_of(pair: Pair, tokenizer: Tokenizer | None, texts: Texts | None = None) -> Lengths:
    """Lengths of a pair in tokens: of its texts if rendered, else of all that it says, without a template's markup.

    In characters if there is no tokenizer.
    """
    if texts is None:
        declared = [json.dumps(list(pair.group.tools), ensure_ascii=False)] if pair.group.tools else []
        parts = [declared + spoken(pair.group.prompt), spoken(pair.chosen.messages), spoken(pair.rejected.messages)]
    else:
        parts = [[text] for text in texts]
    if tokenizer is None:
        return Lengths(*(sum(map(len, said)) for said in parts))
    ids = iter(tokenizer.encode([text for said in parts for text in said]))
    return Lengths(*(sum(len(next(ids)) for _ in said) for said in parts))
