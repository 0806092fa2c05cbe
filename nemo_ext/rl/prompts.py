"""Prompts, and the text between turns, rendered with the model's chat template.

NeMo-RL tokenizes observations without a chat template, so an environment with tools must itself write the template's
text around its messages, including the end of the previous response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_ext.chat.response import OPEN
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template
from nemo_ext.job.progress import notice
from nemo_ext.rl.task import Task

_RESPONSE = "\ue000"  # private use character, which no template writes


@dataclass(frozen=True)
class Prompts:
    """The policy's chat template, which renders prompts and continuations.

    Attributes:
        eos: token that ends a response; NeMo-RL has already added it when the next turn begins.
    """

    template: Template
    eos: str | None = None

    @classmethod
    def load(cls, template: str, *, eos: str | None = None) -> "Prompts":
        """Load a template given its name, file or tokenizer folder; raise ValueError if there is none."""
        return cls(Template.load(template), eos)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, template: str | None = None) -> "Prompts":
        """Load a chat template, by default the tokenizer's, with the tokenizer's end token; ValueError if missing."""
        loaded = Template.of_tokenizer(tokenizer) if template is None else Template.load(template)
        return cls(loaded, tokenizer.eos_token)

    def prompt(self, task: Task) -> tuple[str, bool]:
        """Return the text before the first response, and whether it ends inside a reasoning trace.

        Raises:
            ValueError: the template omits a part of the prompt.
        """
        sample = Sample(id=task.id, messages=task.prompt, tools=task.tools)
        self.template.check_complete(sample, thinking=task.thinking is not False)
        return self._ending(sample, task.thinking)

    def in_mode(self, task: Task) -> Task:
        """Return the task with its thinking mode set, which format rewards need.

        A task without a mode is set to thinking if the template distinguishes the modes; otherwise it is unchanged.
        """
        if task.thinking is not None:
            return task
        sample = Sample(id=task.id, messages=task.prompt, tools=task.tools)
        return replace(task, thinking=True) if self._ending(sample, True) != self._ending(sample, False) else task

    def thinking_share(self, share: float | None) -> float | None:
        """Return `share` (`rl.thinking_share`), or None, with a notice, if the template has no thinking modes."""
        if share is None or self.template.has_modes:
            return share
        notice(f"rl.thinking_share={share:g} does not apply, as the chat template has no thinking modes")
        return None

    def continuation(
        self, answers: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], thinking: bool | None
    ) -> tuple[str, bool]:
        """Return the text between a response and the next one, and whether it ends inside a reasoning trace.

        Args:
            answers: messages that follow the response, such as tool results.
            thinking: whether thinking mode is requested; None for models without modes.

        Raises:
            ValueError: the template rejects the messages or omits one.
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
