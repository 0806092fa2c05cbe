"""Log-likelihoods over an endpoint, compared with lm-evaluation-harness's own back end."""

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.endpoint.client import Client, ClientSettings, Request
from nemo_ext.evaluation.likelihood import Likelihoods, Scored, Tokens, _begins_with
from tests.small_tokenizers import byte_level_bpe

PAIRS = [
    ("The sky is", [" blue", " a colour", "", "green"]),
    ("The sky is \n ", ["blue"]),
    ("", ["no context", " and a space"]),
    ("x" * 300, [" the end of a long context"]),
    ("naïve 🙂 ", ["ü", "🙂🙂"]),
]
LONG = "A text of more than two windows, naïve as it is. " * 12


@pytest.fixture(scope="module")
def harness(served_folder: Path) -> Any:
    """The back end of lm-evaluation-harness, with the maximum length of an endpoint."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return huggingface.HFLM(pretrained=str(served_folder), device="cpu", batch_size=1, max_length=254, dtype="float32")


def measure(
    url: str, what: Callable[[Likelihoods], Awaitable[Any]], tokenizer: Path | None, max_length: int | None = None
) -> Any:
    async def run() -> Any:
        async with Client(url, ClientSettings(attempts=1, patience=0), model="tiny") as client:
            return await what(Likelihoods(client, tokenizer, max_length))

    return asyncio.run(run())


def continuations(url: str, tokenizer: Path | None, pairs: list[tuple[str, list[str]]]) -> list[list[Scored]]:
    async def each(asked: Likelihoods) -> list[list[Scored]]:
        return [await asked.continuations(context, choices) for context, choices in pairs]

    found: list[list[Scored]] = measure(url, each, tokenizer)
    return found


def instance(*arguments: str, kind: str = "loglikelihood") -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_continuations_match_the_harness(served_model: str, served_folder: Path, harness: Any) -> None:
    found = continuations(served_model, served_folder, PAIRS)

    for (context, choices), row in zip(PAIRS, found, strict=True):
        for choice, scored in zip(choices, row, strict=True):
            if not choice:
                assert scored.problem == "'' adds no token to its context"
                continue
            ((logprob, greedy),) = harness.loglikelihood([instance(context, choice)], disable_tqdm=True)
            assert (scored.logprob, scored.greedy) == (pytest.approx(logprob, abs=1e-4), greedy)
            assert scored.bytes == len(choice.encode())


def test_whole_texts_match_the_harness(served_model: str, served_folder: Path, harness: Any) -> None:
    texts = ["short", LONG, LONG[:253], LONG[:254], LONG[:255], LONG[: 2 * 253 + 1]]
    expected = harness.loglikelihood_rolling(
        [instance(text, kind="loglikelihood_rolling") for text in texts], disable_tqdm=True
    )

    async def all_of(asked: Likelihoods) -> list[Scored]:
        return list(await asyncio.gather(*map(asked.rolling, texts)))

    found = measure(served_model, all_of, served_folder)

    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-3)
    assert [(each.bytes, each.tokens) for each in found] == [(len(text.encode()),) * 2 for text in texts]


def test_greedy_continuations(served_model: str, served_folder: Path) -> None:
    async def ask(asked: Likelihoods) -> list[Scored]:
        for number in range(200):  # until the next token is a letter
            context = f"The sky {number} is"
            answer = await asked.client.ask(
                Request(body={"prompt": context, "max_tokens": 1, "temperature": 0}, path="completions")
            )
            best = answer.answer or ""
            if best.isascii() and best.strip() and best.isprintable() and len(best) == 1:
                return await asked.continuations(context, [best, "q" if best != "q" else "z"])
        raise AssertionError

    right, wrong = measure(served_model, ask, served_folder)

    assert (right.greedy, wrong.greedy) == (True, False)
    assert right.logprob > wrong.logprob


def test_without_a_tokenizer(served_model: str, served_folder: Path) -> None:
    pairs = PAIRS[:2]
    known, unknown = (continuations(served_model, place, pairs) for place in (served_folder, None))

    for one, other in zip(*(itertools.chain(*each) for each in (known, unknown)), strict=True):
        assert (one.tokens, one.bytes, one.problem) == (other.tokens, other.bytes, other.problem)
        assert one.problem or one.logprob == pytest.approx(other.logprob, abs=1e-4)
    ((nothing,), (long,)) = continuations(served_model, None, [("", ["text"]), PAIRS[3]])
    assert nothing.problem.startswith("the first token of a text cannot be measured")
    assert long.problem.startswith("HTTP 400: ")


def test_failures_are_problems(endpoint: Any, reply: type[Any], served_folder: Path) -> None:
    endpoint.models = ["tiny"]
    endpoint.reply = lambda payload: reply(status=400, body=b'{"error": "echo: not here"}')
    ((one, other),) = continuations(endpoint.url, served_folder, [("a", ["b", "c"])])
    assert one == other and "echo: not here" in one.problem and math.isnan(one.logprob)

    body = {"choices": [{"text": "ab", "logprobs": None}], "usage": {"prompt_tokens": 2, "completion_tokens": 0}}
    endpoint.reply = lambda payload: reply(body=json.dumps(body).encode())
    ((one,),) = continuations(endpoint.url, served_folder, [("a", ["b"])])
    assert one.problem == "the endpoint does not return log-probabilities of the prompt (echo, logprobs)"
    ((one,),) = continuations(endpoint.url, served_folder, [("a", ["b" * 2048])])
    assert one.problem == "the endpoint does not return log-probabilities of the prompt (echo, logprobs)"
    assert len(endpoint.requests[-1]["prompt"]) == 2049
    scored = measure(endpoint.url, lambda asked: asked.continuations("a", ["b" * 9]), served_folder, max_length=8)
    assert scored[0].problem == "'bbbbbbbbb' has 9 tokens, but the model accepts 7 with a context"

    endpoint.reply = lambda payload: reply(status=401)
    with pytest.raises(ValueError, match="no API key was sent"):
        continuations(endpoint.url, served_folder, [("a", ["b"])])


def test_an_endpoint_that_must_make_a_token(endpoint: Any, reply: type[Any], served_folder: Path) -> None:
    def answer(payload: dict[str, Any]) -> Any:
        if payload["max_tokens"] < 1:
            return reply(status=400, body=b'{"error": "max_tokens must be at least 1"}')
        size = len(payload["prompt"]) + 1
        values = [None, *(-float(place) for place in range(1, size))]
        tops = [None, *({"x": value + (place == 2)} for place, value in enumerate(values[1:], 1))]
        found = {"tokens": ["x"] * size, "token_logprobs": values, "top_logprobs": tops}
        usage = {"prompt_tokens": size - 1, "completion_tokens": 1}
        return reply(body=json.dumps({"choices": [{"text": "x", "logprobs": found}], "usage": usage}).encode())

    endpoint.models, endpoint.reply = ["tiny"], answer

    first, second = continuations(endpoint.url, served_folder, [("ab", ["cd"]), ("abc", ["d"])])

    assert first == [Scored(logprob=-5.0, greedy=False, bytes=2, tokens=2)]
    assert second == [Scored(logprob=-3.0, greedy=True, bytes=1, tokens=1)]
    assert [request["max_tokens"] for request in endpoint.requests] == [0, 1, 1]


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with merges across words that adds a BOS token."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    made = byte_level_bpe([LONG, "The sky is blue. Is the sky green?"], 400, "<s>", "</s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("merging")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def test_tokens_are_split_as_the_harness_splits_them(merging: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from transformers import AutoTokenizer

    utils = pytest.importorskip("lm_eval.utils")
    other = huggingface.HFLM.__new__(huggingface.HFLM)
    other.tokenizer, other.backend, other.add_bos_token = AutoTokenizer.from_pretrained(merging), "causal", None
    other.custom_prefix_token_id = None
    tokens = Tokens(merging)

    for context, continuation in [("The sky is ", "blue"), ("Is the s", "ky"), ("<s>The sky", " is"), ("a\n\n", " b")]:
        before = context.rstrip()
        assert tokens.pair(before, context[len(before) :] + continuation) == other._encode_pair(context, continuation)
    assert tokens.pair("", "blue") == ([0], other.tok_encode("blue", add_special_tokens=False))
    for text in (LONG, LONG[:20], "<s>" + LONG):
        windows = utils.get_rolling_token_windows(other.tok_encode(text), 0, 30, 1)
        assert list(tokens.windows(text, 31)) == [utils.make_disjoint_window(each) for each in windows]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        Tokens(tmp_path)


def test_a_model_of_its_own_code_with_scaled_rope_has_a_tokenizer(served_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decilm"
    shutil.copytree(served_folder, folder)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"model_type": "nemotron-nas", "max_position_embeddings": 64, "rope_theta": 5e5, "rope_scaling": scaled}
    (folder / "config.json").write_text(json.dumps(config))

    assert Tokens(folder).encode("ab") == Tokens(served_folder).encode("ab")


@pytest.mark.parametrize(
    ("text", "token", "begins"),
    [
        ("one two", "one", True),
        ("one two", " one", True),
        ("one two", "<s>", False),
        ("漢字", "\ufffd", True),
        ("漢字", r"bytes:\xe6\xbc", True),
        ("漢字", r"bytes:\xe7", False),
        ("one", "", False),
        ([1, 2], "one", False),
    ],
)
def test_the_first_token_is_the_texts_or_the_tokenizers(text: str | list[int], token: str, begins: bool) -> None:
    assert _begins_with(text, token) is begins
