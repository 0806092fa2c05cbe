"""Prompts and texts between turns, rendered by the model's chat template.

NeMo-RL tokenizes observations without a chat template: an environment with tools must write the template's text around
its messages, including the end of the previous response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_ext.chat.response import OPEN
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template
from nemo_ext.rl.task import Task

_RESPONSE = "\ue000"  # private use character, which no template writes


@dataclass(frozen=True)
class Prompts:
    """Chat template of the policy.

    Attributes:
        template: chat template of the model.
        eos: end-of-sequence token of a response, which NeMo-RL has already added when the next turn begins.
    """

    template: Template
    eos: str | None = None

    @classmethod
    def load(cls, template: str, *, eos: str | None = None) -> "Prompts":
        """Load a template by its name, its file, or a tokenizer's folder; raises ValueError if there is none."""
        return cls(Template.load(template), eos)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, template: str | None = None) -> "Prompts":
        """Named chat template with the tokenizer's end token; None for the tokenizer's own. Raises as `load`."""
        loaded = Template.of_tokenizer(tokenizer) if template is None else Template.load(template)
        return cls(loaded, tokenizer.eos_token)

    def prompt(self, task: Task) -> tuple[str, bool]:
        """Text before the first response, and whether it ends in a trace; ValueError if the template omits a part."""
        sample = Sample(id=task.id, messages=task.prompt, tools=task.tools)
        self.template.check_complete(sample, thinking=task.thinking is not False)
        return self._ending(sample, task.thinking)

    def in_mode(self, task: Task) -> Task:
        """Task with its mode, which format rewards need: thinking if the task has none and the template has modes."""
        if task.thinking is not None:
            return task
        sample = Sample(id=task.id, messages=task.prompt, tools=task.tools)
        return replace(task, thinking=True) if self._ending(sample, True) != self._ending(sample, False) else task

    def continuation(
        self, answers: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], thinking: bool | None
    ) -> tuple[str, bool]:
        """Text between a response and the next one, and whether it ends inside a trace.

        Args:
            answers: messages of the tools.
            tools: declared tools.
            thinking: requested mode.

        Raises:
            ValueError: the template refuses the messages, or omits one.
        """
        before = (Message(role="user", content="-"), Message(role="assistant", content=_RESPONSE))
        sample = Sample(id="continuation", messages=(*before, *answers), tools=tuple(tools))
        # Some templates write tool messages only after structured calls, but responses have calls as text.
        self.template.check_complete(sample, thinking=thinking is not False)
        text, opened = self._ending(sample, thinking)
        # Use the last occurrence, in case a template repeats messages.
        following = text.rpartition(_RESPONSE)[2]
        return following.removeprefix(self.eos) if self.eos else following, opened

    def _ending(self, sample: Sample, thinking: bool | None) -> tuple[str, bool]:
        # A task without a mode is for a model without modes, or uses the template's default.
        mode = True if thinking is None else thinking
        text = self.template.render(sample, thinking=mode, add_generation_prompt=True).text
        return text, text.rstrip().endswith(OPEN)
