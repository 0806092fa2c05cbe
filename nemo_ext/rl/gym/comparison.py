"""NeMo Gym server that compares a group's responses with a generative reward model.

Unlike Gym's genrm_compare, it has time limits. All responses to one prompt are judged together
(`nemo_ext.rl.rewards.rlhf`), once the last one has arrived or after a time limit. Comparisons that the judge does not
answer are excluded and reported. Lengths are in characters, because the server does not have the policy's tokenizer.
"""

from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.global_config import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from pydantic import Field, PrivateAttr

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.job.settings import checked
from nemo_ext.rl.gym.cohorts import Cohorts
from nemo_ext.rl.gym.responses import last_turn, read_answer
from nemo_ext.rl.gym.rows import PARAMETERS, messages
from nemo_ext.rl.gym.server import OwnConfig, VerifyRequest, VerifyResponse, failure
from nemo_ext.rl.judge import Judge, JudgeSettings, Seconds
from nemo_ext.rl.rewards.comparison import LengthControl
from nemo_ext.rl.rewards.rlhf import SHOWN, rlhf_rewards


class ComparisonConfig(OwnConfig):
    """Config of the comparison server.

    Attributes:
        judge: fields of `nemo_ext.rl.judge.JudgeSettings`: endpoint, model, time limits.
        group_size: number of responses per prompt: Gym's num_repeats, NeMo-RL's num_generations_per_prompt.
        wait_seconds: seconds after a group's first response within which the others must arrive.
        show: genrm for a judge whose chat template has the roles response_1 and response_2, otherwise instructed.
        both_orders: whether each pair is judged in both orders.
        length_control: fields of `nemo_ext.rl.rewards.comparison.LengthControl`; lengths are in characters.
        thinking_opened: True if prompts end inside a reasoning trace and the model server does not parse reasoning.
    """

    judge: dict[str, Any]
    group_size: Annotated[int, Field(ge=2)]
    wait_seconds: Seconds = 3600.0
    show: Literal["genrm", "instructed"] = "genrm"
    both_orders: bool = False
    length_control: dict[str, Any] = Field(default_factory=dict)
    thinking_opened: bool = False


_Member = tuple[tuple[Message, ...], Response]


class ComparisonServer(SimpleResourcesServer):
    """Server that compares the responses to each prompt."""

    config: ComparisonConfig
    _cohorts: Cohorts[_Member, dict[str, Any]] = PrivateAttr()
    _judge: Judge = PrivateAttr()
    _control: LengthControl = PrivateAttr()
    _places: "count[int]" = PrivateAttr(default_factory=count)

    def model_post_init(self, context: Any) -> None:
        """Check the settings, and create the judge and the groups; ValueError if a setting is invalid."""
        super().model_post_init(context)
        config = self.config
        if (config.num_workers or 1) > 1:
            raise ValueError(
                f"num_workers must be 1, not {config.num_workers}, because one process must collect all responses of a "
                "group"
            )
        self._judge = Judge(checked(JudgeSettings, config.judge, "judge", strict=True))
        self._control = checked(LengthControl, config.length_control, where="length_control")
        self._cohorts = Cohorts(config.group_size, config.wait_seconds, self._compare)

    async def get_reverify_mode(self) -> str:
        """Return "unsupported", as `gym eval reverify` (Gym 0.7) sends responses one at a time instead of in groups."""
        return "unsupported"

    async def verify(self, body: VerifyRequest) -> VerifyResponse:
        """Return a response with its reward, after its whole group has been judged."""
        row = body.model_dump()
        conversation = row[PARAMETERS]["input"]
        try:
            prompt = messages(conversation)
        except ValueError as error:
            raise HTTPException(422, f"{self.config.name}: invalid row ({error})") from None
        answer = last_turn(row["response"])
        response = read_answer(answer, thinking_opened=self.config.thinking_opened).response
        place = row.get(ROLLOUT_INDEX_KEY_NAME)
        outcome = await self._cohorts.join(
            # The index distinguishes tasks with the same prompt.
            (row.get(TASK_INDEX_KEY_NAME), repr(conversation)),
            f"unnumbered {next(self._places)}" if place is None else place,
            (prompt, response),
        )
        return VerifyResponse(**{**row, **outcome})

    async def _compare(self, members: Sequence[_Member]) -> list[dict[str, Any]]:
        config = self.config
        group = await rlhf_rewards(
            self._judge,
            members[0][0],
            [response for _, response in members],
            show=SHOWN[config.show],
            both_orders=config.both_orders,
            control=self._control,
        )
        rows = zip(group.rewards, group.base, group.length, group.bonus, group.judged, strict=True)
        return [
            {
                "reward": reward,
                "reward/judge": base,
                "reward/length": length,
                "reward/bonus": bonus,
                "group_size": len(members),
                "missing_comparisons": group.missing,
                **failure(not judged, "the judge answered no comparison"),
            }
            for reward, base, length, bonus, judged in rows
        ]
