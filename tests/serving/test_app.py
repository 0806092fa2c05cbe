"""The HTTP server, asked as OpenAI's clients ask."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from nemo_ext.serving.app import Api, Served
from nemo_ext.serving.engine import Token
from nemo_ext.serving.listen import bind, server, url_of
from nemo_ext.serving.settings import ServingSettings

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
KEY = "a key"


@pytest.fixture(scope="module")
def served(served_folder: Path) -> Iterator[Served]:
    from nemo_ext.serving.load import load

    made = load(served_folder, ServingSettings(device="cpu", name="tiny"), {})
    yield made
    made.engine.close()


@pytest.fixture
def client(served: Served) -> Iterator[TestClient]:
    with TestClient(Api(served).app(KEY), headers={"Authorization": f"Bearer {KEY}"}) as opened:
        yield opened


def chat(client: TestClient, **given: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 8, "temperature": 0} | given)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def events(client: TestClient, path: str, **given: Any) -> list[dict[str, Any]]:
    response = client.post(f"/v1/{path}", json={"max_tokens": 8, "temperature": 0, "stream": True} | given)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_model_is_listed(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]

    assert (model["id"], model["max_model_len"]) == ("tiny", 256)


def test_a_chat(client: TestClient, served: Served) -> None:
    answered = chat(client, n=2, seed=3, temperature=1.0)

    prompt = len(served.tokenizer("<|user|>Hello<|end|><|assistant|>")["input_ids"])
    usage, choices = answered["usage"], answered["choices"]
    assert usage["prompt_tokens"] == prompt
    assert usage["total_tokens"] == prompt + usage["completion_tokens"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    assert choices[0]["message"]["content"] != choices[1]["message"]["content"]
    assert choices == chat(client, n=2, seed=3, temperature=1.0)["choices"]


def test_a_strict_client_reads_the_list_of_models_and_one_by_its_name(served: Served) -> None:
    openai = pytest.importorskip("openai")
    name, socket = "org/a model", bind("127.0.0.1", 0)
    running = server(Api(replace(served, name=name)).app(KEY))
    thread = threading.Thread(target=running.run, args=([socket],), daemon=True)
    thread.start()
    asking = openai.OpenAI(api_key=KEY, base_url=url_of("127.0.0.1", socket.getsockname()[1]))
    try:
        (listed,) = asking.models.list().data
        one = asking.models.retrieve(name)
        with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
            asking.models.retrieve("other")
    finally:
        running.should_exit = True
        thread.join()

    openai.types.Model.model_validate(listed.model_dump(), strict=True)
    assert listed == one
    assert (one.id, one.object) == (name, "model") and one.created > 1_700_000_000


def test_a_stream_says_the_same(client: TestClient) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2)
    parts = events(
        client,
        "chat/completions",
        messages=HELLO,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    )

    choices = [part["choices"][0] for part in parts[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    measured = [each for choice in choices for each in (choice.get("logprobs") or {}).get("content", ())]
    assert measured == whole["choices"][0]["logprobs"]["content"]
    assert all(each["top_logprobs"][0]["logprob"] >= each["logprob"] for each in measured)
    assert (parts[-1]["choices"], parts[-1]["usage"]) == ([], whole["usage"])


def test_log_probabilities_of_parts_of_characters(client: TestClient, served: Served) -> None:
    text = "a漢🎉"
    asked = {"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": True}

    found = client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]

    assert found["text_offset"] == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert found["tokens"][:4] == ["a", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2"]
    # Bytes that stand for no character alone are told apart, so none takes another's place.
    assert all(len(top) == 5 for top in found["top_logprobs"][1:])
    assert not any("\ufffd" in name for top in found["top_logprobs"][1:] for name in top)
    content = chat(client, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]
    for each in (one for token in content for one in (token, *token["top_logprobs"])):
        try:
            assert bytes(each["bytes"]).decode() == each["token"].partition("token_id:")[0]
        except UnicodeDecodeError:
            assert each["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in each["bytes"])


def test_echo_and_log_probabilities_as_evaluation_asks(client: TestClient, served: Served) -> None:
    ids = served.tokenizer("one two")["input_ids"]
    asked = {"prompt": [ids, ids[:3]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}

    choices = client.post("/v1/completions", json=asked).json()["choices"]

    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(ids) + 1, 4]
    found = choices[0]["logprobs"]
    assert choices[0]["text"].startswith("one two")
    assert found["token_logprobs"][0] is None and all(value <= 0 for value in found["token_logprobs"][1:])
    assert found["text_offset"][:4] == [0, 1, 2, 3]
    assert found["token_logprobs"][1:3] == pytest.approx(choices[1]["logprobs"]["token_logprobs"][1:3], abs=1e-4)
    nothing = client.post("/v1/completions", json=asked | {"max_tokens": 0}).json()["choices"]
    assert nothing[0]["text"] == "one two"


def test_a_stop_text_ends_an_answer(client: TestClient) -> None:
    text = chat(client, max_tokens=30)["choices"][0]["message"]["content"]
    stop = text[5:7]

    choice = chat(client, max_tokens=30, stop=stop)["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    streamed = events(client, "chat/completions", messages=HELLO, max_tokens=30, stop=[stop])
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in streamed) == text[: text.index(stop)]


@pytest.fixture
def say(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the engine answer with a text."""

    def make(text: str) -> None:
        ids = [*served.tokenizer(text)["input_ids"], served.tokenizer.eos_token_id]

        async def generate(prompt: Any, sampling: Any) -> AsyncGenerator[Token]:
            for number, token in enumerate(ids):
                yield Token(token, logprob=-1.0, end="stop" if number == len(ids) - 1 else None)

        monkeypatch.setattr(served.engine, "generate", generate)

    return make


def test_a_mode_of_the_template_opens_a_trace(client: TestClient, say: Callable[[str], None]) -> None:
    say("So it is.</think>Yes.")

    message = chat(client, chat_template_kwargs={"enable_thinking": True})["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So it is.", "Yes.")
    assert "reasoning_content" not in chat(client)["choices"][0]["message"]


def test_enable_thinking_may_stand_in_the_request_itself(client: TestClient, say: Callable[[str], None]) -> None:
    say("So it is.</think>Yes.")

    message = chat(client, enable_thinking=True)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So it is.", "Yes.")
    assert "reasoning_content" not in chat(client, enable_thinking=False)["choices"][0]["message"]
    fields = {"no_stop_trim": False, "return_hidden_states": False, "min_p": 0.0, "modalities": [], "user": None}
    assert chat(client, **fields)["usage"] == chat(client)["usage"]


def test_a_prompt_is_the_same_however_its_messages_are_written(
    client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    template += "{{ m['tool_calls'] | tojson if m['tool_calls'] }}\n{% endfor %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    monkeypatch.setattr(Api, "_ids", lambda api, prompt, special: prompts.append(prompt) or [1])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    other = {"id": "b", "type": "function", "function": {"name": "f", "arguments": {"x": "z"}}}
    answers = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("a", "b")]
    plain = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call, other]}, *answers]
    text = {**call, "function": {"name": "f", "arguments": '{"x": "y"}'}}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    written = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [text, other]},
        *reversed(answers),
    ]

    chat(client, messages=plain)
    chat(client, messages=written)
    chat(client, messages=[*HELLO, {"role": "assistant", "content": "<think>So"}], continue_final_message=True)

    assert prompts[0] == prompts[1]
    assert prompts[2].endswith("assistant:<think>So")


def test_calls_come_back_as_calls(client: TestClient, say: Callable[[str], None]) -> None:
    text = 'Now: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    say(text)

    choice = chat(client, tools=TOOLS)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Now:")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
    (part,) = [
        part["choices"][0]["delta"]["tool_calls"]
        for part in events(client, "chat/completions", messages=HELLO, tools=TOOLS)
        if "tool_calls" in part["choices"][0]["delta"]
    ]
    assert part[0]["function"] == call["function"]
    assert chat(client, tools=TOOLS, tool_choice="none")["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("path", "given", "said"),
    [
        ("chat/completions", {"messages": []}, "messages: "),
        ("chat/completions", {}, "messages: "),
        ("chat/completions", {"messages": "hi"}, "messages: "),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role: expected a role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "maximum context length is 256"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 1000}, "maximum context length is 256"),
        ("chat/completions", {"messages": HELLO, "temperature": "hot"}, "temperature: "),
        ("chat/completions", {"messages": HELLO, "temperature": -1}, "temperature: "),
        ("chat/completions", {"messages": HELLO, "stop": ""}, "stop: "),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [1]}]},
            "tool_calls[0]: expected an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            "messages[0].tool_calls[0].function: expected an object",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}]},
            "expected JSON",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]: a part of type 'image_url' is not supported",
        ),
        (
            "chat/completions",
            {"messages": [*HELLO, {"role": "tool", "tool_call_id": "a", "content": ""}]},
            "messages[1]",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "content: expected a string"),
        ("chat/completions", {"messages": HELLO, "do_sample": False}, "do_sample: "),
        ("chat/completions", {"messages": HELLO, "thinking_budget": 0}, "thinking_budget: "),
        ("chat/completions", {"messages": HELLO, "parallel_tool_calls": False}, "parallel_tool_calls: "),
        ("chat/completions", {"messages": HELLO, "include_reasoning": False}, "include_reasoning: "),
        (
            "chat/completions",
            {"messages": HELLO, "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            "enable_thinking contradicts chat_template_kwargs",
        ),
        ("completions", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens: "),
        ("chat/completions", {"messages": HELLO, "top_p": 0}, "top_p: "),
        ("chat/completions", {"messages": HELLO, "n": 0}, "n: "),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 3}, "top_logprobs requires logprobs"),
        ("chat/completions", {"messages": HELLO, "frequency_penalty": 0.5}, "frequency_penalty: "),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format: "),
        ("chat/completions", {"messages": HELLO, "no_such": 1}, "no_such: "),
        ("chat/completions", {"messages": HELLO, "model": "another"}, "unknown model 'another'"),
        (
            "chat/completions",
            {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}},
            "must not contain tokenize",
        ),
        ("completions", {"prompt": ""}, "prompt is empty"),
        ("completions", {"prompt": []}, "prompt is empty"),
        ("completions", {"prompt": [5, 99999]}, "token ids must be from 0 to 511, not 99999"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens: "),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    client: TestClient, path: str, given: dict[str, Any], said: str
) -> None:
    response = client.post(f"/v1/{path}", json=given)

    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert said in message and "\n" not in message


def test_a_body_that_is_no_json(client: TestClient) -> None:
    assert client.post("/v1/completions", content=b"{oh").status_code == 400


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer other"}, {"Authorization": KEY}])
def test_without_the_key_nothing_but_health(served: Served, given: dict[str, str]) -> None:
    with TestClient(Api(served).app(KEY), headers=given) as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/v1/models").status_code == stranger.get("/metrics").status_code == 401
        assert stranger.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 401


def test_metrics(client: TestClient) -> None:
    usage = chat(client)["usage"]

    lines = client.get("/metrics").text.splitlines()

    assert f"vllm:generation_tokens_total {float(usage['completion_tokens'])}" in lines
    assert "vllm:num_requests_waiting 0.0" in lines


def test_requests_at_once(served: Served) -> None:
    import httpx

    async def ask() -> list[str]:
        transport = httpx.ASGITransport(app=Api(served).app(None))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            asked = [
                client.post("/v1/completions", json={"prompt": f"{n} and", "max_tokens": n, "temperature": 0})
                for n in range(1, 17)
            ]
            return [response.json()["choices"][0]["text"] for response in await asyncio.gather(*asked)]

    with TestClient(Api(served).app(None)) as alone:
        one_by_one = [
            alone.post("/v1/completions", json={"prompt": f"{n} and", "max_tokens": n, "temperature": 0}).json()
            for n in range(1, 17)
        ]
    assert asyncio.run(ask()) == [each["choices"][0]["text"] for each in one_by_one]


def test_a_temperature_near_nothing_is_greedy(client: TestClient) -> None:
    assert chat(client, temperature=1e-40)["choices"] == chat(client, temperature=0)["choices"]


def test_a_stream_with_tools_gives_every_tokens_log_probability(client: TestClient, say: Callable[[str], None]) -> None:
    say("a <tool b")

    parts = events(client, "chat/completions", messages=HELLO, tools=TOOLS, logprobs=True)
    whole = chat(client, tools=TOOLS, logprobs=True)["choices"][0]["logprobs"]["content"]

    streamed = [token for part in parts for token in (part["choices"][0].get("logprobs") or {}).get("content", [])]
    assert streamed == whole
