"""Prompts, single responses and conversations of TRL's rollouts, with a scripted model in place of a trained one."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.groups import group_reward
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import bank, generate, python_tool
from nemo_ext.rl.trl.rollouts import Rollouts

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def rollouts(model: Path, record: Path, *environments: str, tokens: int = 4000, generations: int = 2) -> Rollouts:
    from transformers import AutoTokenizer

    prompts = Prompts.load("llama_nemotron", eos="<|eot_id|>")
    return Rollouts(
        tokenizer=AutoTokenizer.from_pretrained(model),
        prompts=prompts,
        environments={name: Episodes({"name": name}, prompts) for name in environments},
        generations=generations,
        record=record,
        tokens=tokens,
    )


def ids(made: Rollouts, text: str) -> list[int]:
    return made.encoded([text])[0]


def call(text: ToolCall) -> str:
    return f"<TOOLCALL>[{json.dumps({'name': text.name, 'arguments': dict(text.arguments)})}]</TOOLCALL>"


def math(answer: str, question: str = "What is it?") -> Task:
    prompt = (Message(role="user", content=question),)
    return Task(id=question, environment="math", prompt=prompt, reference={"answer": answer})


def test_a_response_is_verified_from_its_tokens(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    text = made.prompt(math("7"))
    right, wrong, cut = "\\boxed{7}<|eot_id|>", "\\boxed{8}<|eot_id|>", "<think>\\boxed{7}"

    found = made.verified([text] * 3, [ids(made, each) for each in (right, wrong, cut)])

    assert [one.turn.verdict.outcome for one in found if one.turn.verdict] == ["correct", "wrong", "wrong"]
    assert [one.turn.response.finished for one in found] == [True, True, False]
    assert made.rewards(found) == [1.0, 0.0, 0.0]
    assert found[0].turn.response.tokens == len(ids(made, right))


def test_a_prompt_is_exactly_the_text_of_the_template(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")

    encoded = ids(made, made.prompt(math("7")))

    assert encoded.count(made.tokenizer.bos_token_id) == 1
    assert made.tokenizer.decode(encoded).endswith("assistant<|end_header_id|>\n\n")


def test_tasks_of_one_prompt_must_have_one_reference(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")

    made.prompt(math("7"))
    made.prompt(math("7"))
    with pytest.raises(ValueError, match="same prompt but different environments or references"):
        made.prompt(math("8"))


def test_a_conversation_continues_until_the_task_is_done(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "bank")
    tasks = list(generate("bank", 2, seed=3, level=1))
    texts = [made.prompt(task) for task in tasks]
    scripts = [[*map(call, bank.solution(task)), "Done."] for task in tasks]
    scripts[1] = ["I will not."]
    seen: list[list[int]] = []

    def generate_(prompts: list[list[int]], room: int) -> tuple[list[list[int]], list[list[float]]]:
        assert room > 0
        seen.extend(prompts)
        responses = [ids(made, scripts[_of(made, texts, prompt)].pop(0) + "<|eot_id|>") for prompt in prompts]
        return responses, [[-float(token) for token in response] for response in responses]

    done, refused = made.conversations(texts, generate_)

    assert done.turn.verdict is not None and done.turn.verdict.outcome == "correct"
    assert refused.turn.verdict is not None and refused.turn.verdict.outcome == "wrong"
    # Tokens of the model are its own, tokens of the bank are not.
    generated = [token for token, mine in zip(done.tokens, done.mask, strict=True) if mine]
    assert made.tokenizer.decode(generated).count("<|eot_id|>") == len(bank.solution(tasks[0])) + 1
    read = [token for token, mine in zip(done.tokens, done.mask, strict=True) if not mine]
    assert "assistant<|end_header_id|>" in made.tokenizer.decode(read)
    assert done.logprobs == [-token * mine for token, mine in zip(done.tokens, done.mask, strict=True)]
    # Every prompt has all previous tokens, without tokenising again.
    whole = done.prompt + done.tokens
    assert all(whole[: len(prompt)] == prompt for prompt in seen if _of(made, texts, prompt) == 0)


def test_outputs_of_python_are_not_trained_on(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "python_tool")
    (task,) = generate("python_tool", 1, seed=3)
    calls = python_tool.solution(task)
    answer, failing = task.reference["answer"], ToolCall(name=calls[0].name, arguments={"code": "1 / 0"})
    steps = [*map(call, (*calls, failing)), f"\\boxed{{{answer}}}"]

    (found,) = made.conversations(
        [made.prompt(task)], lambda prompts, room: ([ids(made, steps.pop(0) + "<|eot_id|>") for _ in prompts], None)
    )

    assert made.rewards([found]) == [1.0]
    read = made.tokenizer.decode([token for token, mine in zip(found.tokens, found.mask, strict=True) if not mine])
    assert answer in read and "ZeroDivisionError: division by zero" in read and "boxed" not in read
    metrics = made.metrics()
    assert (metrics["python_tool/calls"], metrics["python_tool/failed_calls"]) == (3, 1)


def test_equal_ids_in_different_files(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    one, other = replace(math("7", "one?"), id="0"), replace(math("8", "other?"), id="0")
    texts = [made.prompt(one), made.prompt(other)]

    found = made.verified(texts, [ids(made, f"\\boxed{{{answer}}}<|eot_id|>") for answer in "78"])

    assert made.rewards(found) == [1.0, 1.0]


def test_the_end_of_turn_of_the_template_ends_a_response(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<|pad|>"
    prompts = Prompts.from_tokenizer(tokenizer)
    environments = {name: Episodes({"name": name}, prompts) for name in ("math", "bank")}
    made = Rollouts(
        tokenizer=tokenizer,
        prompts=prompts,
        environments=environments,
        generations=2,
        record=tmp_path / "r.jsonl",
        tokens=4000,
    )
    (task,) = generate("bank", 1, seed=3, level=1)
    steps = [*map(call, bank.solution(task)), "Done."]

    (one,) = made.verified([made.prompt(math("7"))], [ids(made, "\\boxed{7}<|eot_id|>")])
    (played,) = made.conversations(
        [made.prompt(task)], lambda prompts, room: ([ids(made, steps.pop(0) + "<|eot_id|>") for _ in prompts], None)
    )

    assert one.turn.response.finished and made.rewards([one]) == [1.0]
    assert played.turn.verdict is not None and played.turn.verdict.outcome == "correct"
    text = made.tokenizer.decode(played.tokens)
    assert "<|eot_id|><|start_header_id|>" in text and "<|eot_id|><|eot_id|>" not in text


def test_a_long_conversation_does_not_shorten_others(model: Path, tmp_path: Path) -> None:
    *_, task = generate("bank", 2, seed=1)  # with a user who speaks again
    made = rollouts(model, tmp_path / "r.jsonl", "bank", tokens=3000)
    rooms: list[int] = []

    def write(prompts: list[list[int]], room: int) -> tuple[list[list[int]], None]:
        rooms.append(room)
        words = ["blah " * 400, "Hello."] if len(rooms) == 1 else ["Good bye."] * len(prompts)
        return [ids(made, f"{text}<|eot_id|>")[:room] for text in words], None

    made.conversations([made.prompt(task)] * 2, write)

    assert rooms[0] == 3000
    assert rooms[1] > 2500, "the room of the short conversation"


def test_tasks_with_one_prompt_count_as_one(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    for name in ("a", "b", "a"):
        made.prompt(replace(math("7"), id=name))

    assert made.same == {"b"}


def test_a_conversation_without_room_is_verified_in_its_state(model: Path, tmp_path: Path) -> None:
    (task,) = generate("bank", 1, seed=3, level=1)
    first = call(bank.solution(task)[0]) + "<|eot_id|>"
    made = rollouts(model, tmp_path / "r.jsonl", "bank", tokens=len(first) + 10)

    (found,) = made.conversations([made.prompt(task)], lambda prompts, room: ([ids(made, first)], None))

    assert found.turn.verdict is not None and found.turn.verdict.outcome == "wrong"
    assert set(found.mask) == {1}


def test_lengths_are_controlled_within_groups(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    made.group = group_reward({"length_control": {"answer": 0.5, "thinking": 0.0}})
    text = made.prompt(math("7"))
    short, long = "\\boxed{7}<|eot_id|>", "It is seven: \\boxed{7}<|eot_id|>"

    rewards = made.rewards(made.verified([text] * 2, [ids(made, short), ids(made, long)]))

    assert rewards[0] > rewards[1]
    assert sum(rewards) == pytest.approx(2.0, abs=1.01)


def test_rollouts_are_recorded_in_the_form_that_curricula_read(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    text = made.prompt(math("7"))
    found = made.verified([text], [ids(made, "\\boxed{8}<|eot_id|>")])

    (reward,) = made.rewards(found)
    line = made.line(found[0], reward)

    assert (line["id"], line["reward"], line["outcome"]) == ("What is it?", 0.0, "wrong")
    assert line["response"] == "\\boxed{8}", "`finished` shows that it ended"
    assert made.metrics()["math/episodes"] == 1


def _of(made: Rollouts, texts: list[str], prompt: list[int]) -> int:
    decoded = made.tokenizer.decode(prompt)
    return next(number for number, text in enumerate(texts) if decoded.startswith(text))


def test_malformed_responses_are_found_in_tokens(model: Path, tmp_path: Path) -> None:
    made = rollouts(model, tmp_path / "r.jsonl", "math")
    end = "<|eot_id|>"
    well, thinking, calls = (False, False), (True, False), (False, True)

    for text, opened, expected in (
        (f"2{end}", False, well),
        (f"<think>so</think>2{end}", False, well),
        (f"so</think>2{end}", True, well),
        (f"so</think>2{end}", False, thinking),
        (f"<think>so{end}", False, thinking),
        (f"<think>so</think>2<think>{end}", False, thinking),
        ("<think>so", False, well),  # cut off
        (call(ToolCall(name="f", arguments={})) + end, False, well),
        (f"<TOOLCALL>[{{</TOOLCALL>{end}", False, calls),
    ):
        before = ids(made, "assistant\n<think>\n" if opened else "assistant\n")
        assert made.faults(before, ids(made, text)) == expected, text
