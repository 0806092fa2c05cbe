import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.groups import Member, length_controlled
from nemo_ext.rl.nemo_rl.group_rewards import Groups, by_group, groups_of, lengths
from nemo_ext.rl.rewards.advantages import group_advantages
from nemo_ext.rl.rewards.comparison import LengthControl
from nemo_ext.rl.task import Task

MARKER = [7, 8]


def prompts_of(groups: int, generations: int) -> torch.Tensor:
    return torch.arange(groups)[:, None].repeat_interleave(generations, 0)


@st.composite
def groups_of_rewards(draw: st.DrawFn) -> list[list[float]]:
    values = st.sampled_from([0.0, 0.1, 1.0, -2.5, 3.7])
    size = draw(st.integers(2, 7))
    equal = values.map(lambda value: [value] * size)
    return draw(st.lists(st.lists(values, min_size=size, max_size=size) | equal, min_size=1, max_size=5))


@given(
    rewards=groups_of_rewards(),
    leave_one_out=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_advantages_match_the_reference(
    rewards: list[list[float]], leave_one_out: bool, biased: bool, dtype: torch.dtype
) -> None:
    size = len(rewards[0])
    given = torch.tensor(rewards, dtype=dtype).flatten()
    groups = Groups(generations=size, leave_one_out=leave_one_out, biased=biased)

    baseline, std = groups.baseline_and_std(prompts_of(len(rewards), size), given, torch.ones(len(given)))

    expected = group_advantages(
        rewards, baseline="leave_one_out" if leave_one_out else "mean", normalise="std" if biased else "unbiased_std"
    )
    divided = torch.where(std > 0, (given - baseline) / (std + 1e-6), given - baseline)
    np.testing.assert_allclose(divided.numpy(), expected.flatten(), rtol=1e-4, atol=1e-5)
    equal = [len(set(group)) == 1 for group in rewards]
    assert ((std.view(-1, size) == 0).all(1).numpy() == equal).all()


def test_identical_prompts_of_one_step_stay_two_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 3.0])

    baseline, _ = Groups(generations=2, leave_one_out=False).baseline_and_std(torch.zeros(4, 3), rewards, torch.ones(4))

    assert baseline.tolist() == [0.5, 0.5, 4.0, 4.0]


def test_invalid_responses_do_not_count() -> None:
    rewards, valid = torch.tensor([1.0, 0.0, 9.0, 4.0, 2.0, 8.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])

    groups = Groups(generations=3, leave_one_out=True)
    baseline, std = groups.baseline_and_std(prompts_of(2, 3), rewards, valid)

    assert baseline.tolist() == [0.0, 1.0, 0.5, 4.0, 2.0, 8.0]  # a group with one valid response keeps its rewards
    assert std.tolist() == pytest.approx([0.5**0.5] * 3 + [0] * 3)


def test_incomplete_batches_are_grouped_by_prompt() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 6.0])
    prompts = torch.tensor([[1], [1], [2], [2], [2]])

    baseline, _ = Groups(generations=3, leave_one_out=False).baseline_and_std(prompts, rewards, torch.ones(5))

    assert baseline.tolist() == [0.5, 0.5, 4.0, 4.0, 4.0]


def message(content: str, ids: list[int]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "token_ids": torch.tensor(ids)}


@pytest.mark.parametrize(
    ("content", "ids", "opened", "expected"),
    [
        ("a</think>b", [1, 7, 8, 2, 3], True, (3, 2)),
        ("<think>a</think>b", [5, 1, 7, 8, 2], False, (4, 1)),
        ("a</think>bcdefgh", [1, 9, 9, 9], True, (2, 2)),  # joined tokens: by characters, 9 of 16
        ("never ends", [1, 2, 3], True, (3, 0)),
        ("<think>never ends", [1, 2, 3], False, (3, 0)),
        ("plain", [1, 2, 3], False, (0, 3)),
        ("", [], False, (0, 0)),
    ],
)
def test_generated_tokens_are_counted(content: str, ids: list[int], opened: bool, expected: tuple[int, int]) -> None:
    log = [{"role": "user", "content": "?", "token_ids": torch.tensor([7, 8, 1])}, message(content, ids)]

    assert lengths(log, MARKER, opened=opened) == expected


def test_all_turns_are_counted_without_observations() -> None:
    observed = {"role": "environment", "content": "x", "token_ids": torch.tensor([4, 4])}

    assert lengths([message("a</think>b", [1, 7, 8, 2]), observed, message("b", [2])], MARKER) == (3, 2)


def batch_of(rewards: list[float], tasks: list[str]) -> dict[str, Any]:
    logs = [
        [{"role": "user", "content": task, "token_ids": torch.tensor([1])}, message("x", [1] * (n + 1))]
        for n, task in enumerate(tasks)
    ]
    prompt = (Message(role="user", content="hello"),)
    episode = Episode(task=Task(id="1", environment="math", prompt=prompt), thinking_opened=False)
    infos = [{"episode": episode}] * len(tasks)
    return {"message_log": logs, "total_reward": torch.tensor(rewards), "task_name": tasks, "extra_env_info": infos}


def test_group_rewards_apply_to_the_named_environments_only() -> None:
    reward = groups_of(
        generations=2,
        advantage={"baseline": "leave_one_out"},
        group={"environments": ["math"], "length_control": {"thinking": 0, "thinking_bonus": 0, "answer_bonus": 0}},
    )
    batch = batch_of([1.0, 1.0, 1.0, 1.0], ["nemo_ext_code", "nemo_ext_code", "nemo_ext_math", "nemo_ext_math"])

    assert reward.rewritten(batch, MARKER).tolist() == [1.0, 1.0, 1.25, 0.75]


def test_a_batch_of_incomplete_groups_is_refused() -> None:
    groups = Groups(generations=2, leave_one_out=False, reward=lambda members: [[0.0, 0.0] for _ in members])

    with pytest.raises(ValueError, match="NeMo-RL's batch of 3 responses is not divisible into groups of 2"):
        groups.rewritten(batch_of([0.0] * 3, ["a"] * 3), MARKER)
    with pytest.raises(ValueError, match="responses 0 to 1 of NeMo-RL's batch must have the same prompt"):
        groups.rewritten(batch_of([0.0] * 2, ["a", "b"]), MARKER)


@pytest.mark.parametrize("given", [[[1.0]], [[1.0, float("nan")]]])
def test_a_group_reward_must_return_one_number_per_response(given: list[list[float]]) -> None:
    groups = Groups(generations=2, leave_one_out=False, reward=lambda members: given)

    with pytest.raises(ValueError, match="must return 2 finite numbers"):
        groups.rewritten(batch_of([0.0] * 2, ["a", "a"]), MARKER)


def member(reward: float, thinking: int, answer: int) -> Member:
    response = Response(text="", thinking="t" if thinking else None, answer="a" if answer else "")
    return Member(reward=reward, thinking_tokens=thinking, answer_tokens=answer, prompt=(), response=response)


def test_length_control_matches_the_paper() -> None:
    members = [member(1, 10, 4), member(1, 30, 4), member(0, 20, 4), member(0, 40, 4)]

    rewards = length_controlled(members, LengthControl(percentile=50))

    # Weights 1, 1/3, 2/3, 0 less their mean 1/2, halved; answers are equally long; both bonuses for the first,
    # that of answers for the second too.
    np.testing.assert_allclose(rewards, [1 + 0.25 + 1.0, 1 - 1 / 12 + 0.5, 0 + 1 / 12, 0 - 0.25])


def test_an_empty_answer_is_not_a_short_one() -> None:
    none = length_controlled([member(1, 0, 0), member(1, 0, 9), member(0, 0, 3)], LengthControl(percentile=0))

    assert none[0] == none[1] < 1  # counts as long as the longest, and has no bonus


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": {"baseline": "median"}}, "advantage.baseline='median': input should be 'mean'"),
        ({"advantage": {"normalize": "std"}}, "did you mean 'normalise'"),
        ({"group": {"length_control": {"percentile": 200}}}, "percentile=200"),
        ({"group": {"lenght_control": {}}}, "did you mean 'length_control'"),
        ({"generations": 1}, "num_generations_per_prompt must be at least 2, not 1"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_of(**{"generations": 4, "advantage": None, "group": None, **settings})


def test_a_judge_compares_the_members_of_every_group(endpoint: Any, reply: Any) -> None:
    def judge(payload: dict[str, Any]) -> Any:
        # The longer of two is the better one.
        texts = [message["content"] for message in payload["messages"]][-2:]
        first = len(texts[0]) > len(texts[1])
        helpful, rank = ((5, 1), 1) if first else ((1, 5), 6)
        scores = {"score_1": helpful[0], "score_2": helpful[1], "ranking": rank}
        return reply(text=json.dumps(scores))

    endpoint.reply = judge
    settings = {"judge": {"endpoint": endpoint.url, "model": "genrm"}, "length_control": {}}
    settings["length_control"] = {"thinking": 0, "answer": 0, "thinking_bonus": 0, "answer_bonus": 0}
    groups = groups_of(generations=2, advantage=None, group=settings)
    batch = batch_of([0.0] * 4, ["a"] * 4)
    for row, text in enumerate(("short", "a longer one", "quite long a text", "tiny")):
        batch["message_log"][row][1] = message(text, [1])

    rewards = groups.rewritten(batch, MARKER).tolist()

    assert rewards[0] < rewards[1] and rewards[2] > rewards[3]
    assert len(endpoint.requests) == 4  # both orders of one pair, for each of two groups


def test_a_loss_per_group_is_the_mean_over_groups_of_token_means() -> None:
    """The mean over all tokens of losses that are proportional to the advantage, for groups of very unequal lengths."""
    counts = torch.tensor([1, 2, 30, 40, 5, 5, 7, 3])
    mask = (torch.arange(41) > 0) & (torch.arange(41) <= counts[:, None])
    sample_mask = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0])  # a response without loss, and a group without any
    advantages = torch.randn(8, 1, generator=torch.Generator().manual_seed(1)).expand(8, 41)
    seen: list[torch.Tensor] = []

    def train(data: dict[str, torch.Tensor], loss: str, *, timer: int) -> tuple[str, int]:
        seen.append(data["advantages"])
        return loss, timer

    data = {"token_mask": mask.float(), "sample_mask": sample_mask, "advantages": advantages}
    assert by_group(train, 2)(data, "loss", timer=3) == ("loss", 3)

    trained = mask * sample_mask[:, None]
    by_token = (seen[0] * trained).sum() / trained.sum()
    groups = [(advantages * trained)[row : row + 2].sum() / trained[row : row + 2].sum() for row in (0, 2, 4)]
    assert by_token == pytest.approx(torch.stack(groups).mean())
    assert data["advantages"] is advantages, "the batch that NeMo-RL logs is unchanged"
    with pytest.raises(ValueError, match="8 responses is not divisible into groups of 3"):
        by_group(train, 3)(data)
