"""Lengths of a pair, and its texts if rendered by a chat template."""

import json
from dataclasses import replace

from nemo_ext.chat.sample import Message, Sample, has_reasoning, spoken
from nemo_ext.chat.template import Template
from nemo_ext.data.preference.filters import Lengths
from nemo_ext.data.preference.group import Pair
from nemo_ext.data.text.tokenizers import Tokenizer

Texts = tuple[str, str, str]


def rendered_pair(
    question: Sample, chosen: tuple[Message, ...], rejected: tuple[Message, ...], template: Template
) -> Texts:
    """Return the texts of the prompt (with generation prompt) and of both answers (up to the end-of-turn token).

    The thinking mode is that of `question`, the sample with the prompt; if that is None, thinking is on if an answer
    has reasoning.

    Raises:
        ValueError: the template rejects a conversation, omits a part of it, or does not start an answer with its
            generation prompt.
    """
    thinking = question.thinking
    if thinking is None:
        thinking = has_reasoning(chosen) or has_reasoning(rejected)
    prompt = template.render(question, thinking=thinking, add_generation_prompt=True).text
    answers = []
    for side in (chosen, rejected):
        answered = replace(question, messages=question.messages + side)
        template.check_complete(answered, thinking=thinking)
        whole = template.render(answered, thinking=thinking).text
        if not whole.startswith(prompt):
            raise ValueError(
                f"chat template {template.name} does not start answers with its generation prompt: set another template"
            )
        answers.append(whole[len(prompt) :].rstrip("\n"))  # a line break after an answer belongs to the next message
    return prompt, answers[0], answers[1]


def lengths_of(pair: Pair, tokenizer: Tokenizer | None, texts: Texts | None = None) -> Lengths:
    """Measure a pair in tokens, or in characters if there is no tokenizer.

    Measured on the rendered texts, if given; otherwise on the contents, reasoning and calls, without template markup.
    """
    if texts is None:
        declared = [json.dumps(list(pair.group.tools), ensure_ascii=False)] if pair.group.tools else []
        parts = [declared + spoken(pair.group.prompt), spoken(pair.chosen.messages), spoken(pair.rejected.messages)]
    else:
        parts = [[text] for text in texts]
    if tokenizer is None:
        return Lengths(*(sum(map(len, part)) for part in parts))
    ids = iter(tokenizer.encode([text for part in parts for text in part]))
    return Lengths(*(sum(len(next(ids)) for _ in part) for part in parts))
