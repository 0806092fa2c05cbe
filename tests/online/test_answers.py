"""Responses of an endpoint with their rewards."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation import job, judged
from nemo_ext.generate.settings import Sampling
from nemo_ext.job.config import compose
from nemo_ext.online.answers import Generation, generate
from nemo_ext.online.report import summary
from nemo_ext.rl.groups import Member
from nemo_ext.rl.task import Task

PAIR = [
    Task.from_record({"id": "a", "environment": "chat", "prompt": "Say a."}),
    Task.from_record({"id": "b", "environment": "chat", "prompt": "Say b.", "thinking": True}),
]


@pytest.fixture
def config(endpoint: Any, reply: type[Any], monkeypatch: pytest.MonkeyPatch, random_llama: Path) -> dict[str, Any]:
    """Config with an endpoint that responds `ok`, or `ok and`, which is cut off."""

    @contextmanager
    def served(*_: Any) -> Iterator[tuple[str, str, None]]:
        yield endpoint.url, "m", None

    def answer(payload: dict[str, Any]) -> Any:
        cut = payload["seed"] % 2 == 1
        message = {"role": "assistant", "content": "ok and" if cut else "ok"}
        choice = {"message": message, "finish_reason": "length" if cut else "stop"}
        return reply(body=json.dumps({"choices": [choice], "usage": {"completion_tokens": 3 if cut else 1}}).encode())

    monkeypatch.setattr(job, "endpoint_of", served)
    endpoint.models, endpoint.reply = ["m"], answer
    return compose("online", ["preset=rpo_online", f"model={random_llama}", "evaluate.draws=10", "evaluate.patience=1"])


def generation(reward: Any) -> Generation:
    return Generation(samples=8, sampling=Sampling(temperature=1.0), max_tokens=9, environments={}, group=reward)


def test_responses_are_judged_in_groups_once(
    config: dict[str, Any], endpoint: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(judged, "AT_ONCE", 1)
    groups: list[list[Member]] = []

    def reward(given: Any) -> list[list[float]]:
        if len(groups) == 1:
            raise KeyboardInterrupt
        groups.extend(given)
        return [[float(len(one.response.answer)) for one in each] for each in given]

    with pytest.raises(KeyboardInterrupt):
        generate(config, PAIR, generation(reward), tmp_path)
    groups.append([])
    found = generate(config, PAIR, generation(reward), tmp_path)

    assert len(endpoint.requests) == 16, "no request is repeated"
    assert [len(group) for group in groups] == [8, 0, 8], "and no group is judged twice"
    thinking = [request.get("chat_template_kwargs") for request in endpoint.requests]
    assert thinking.count({"enable_thinking": True}) == thinking.count(None) == 8
    assert [line["id"] for line in found] == ["chat/a", "chat/b"]
    for line in found:
        assert {(one["message"]["content"], one["score"]) for one in line["generations"]} == {("ok", 2.0)}
        assert {(one["message"]["content"], one["score"]) for one in line["cut"]} == {("ok and", 6.0)}
    values = summary(found, seed=1)
    cut = sum(len(line["cut"]) for line in found) / 16
    assert values["cut"] == cut and values["reward"] == pytest.approx(2 + 4 * cut)
    assert (values["best"], values["worst"], values["tokens"]) == (6, 2, pytest.approx(1 + 2 * cut))


def test_without_a_judge_scores_come_from_verifiers(config: dict[str, Any], tmp_path: Path) -> None:
    task = Task.from_record(
        {"id": "a", "environment": "contains", "prompt": "Say ok and.", "reference": {"answers": ["ok and"]}}
    )

    (line,) = generate(config, [task], generation(None), tmp_path)

    assert {one["score"] for one in line["generations"]} == {0.0}
    assert {one["score"] for one in line["cut"]} == {1.0}
