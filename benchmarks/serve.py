"""Requests per second of `nemo-ext serve` compared with `transformers serve`, on the CPU and in one run.

    python benchmarks/serve.py [--transformers-python PYTHON] [--at-a-time 16] [--threads 1] [--rounds 3] [--json FILE]

First a Llama of 0.85 M parameters with a byte tokenizer and a chat template is made; its last layer never prefers the
end-of-answer token, so that every answer has the maximum length. All servers get the same greedy chat requests without
streaming: ours 16 at a time and sequentially, `transformers serve` 16 at a time, by default (it answers sequentially)
and with continuous batching. All are up during the run, and idle while another one is measured; they alternate, and
medians are reported. Token counts are checked, and texts compared. By default each server computes with one thread, as
with several a thread that waits for a core delays the rest.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUESTS = {16: 160, 128: 48}
"""Number of requests, by number of new tokens."""
END = 256


def make_model(folder: Path) -> None:
    """Make a Llama with random weights, a byte tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"vocab_size": END + 1, "eos_token_id": END, "pad_token_id": END, "bos_token_id": None}
    config = LlamaConfig(**sizes, **ids, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=512)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[END] = 0
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: str
    key: str = ""


@contextlib.contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen]:
    with log.open("w") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait(process: subprocess.Popen, log: Path, up: Path | int) -> None:
    """Wait until a file exists, or a port is open."""
    while process.poll() is None:
        with socket.socket() as tried:
            if up.exists() if isinstance(up, Path) else not tried.connect_ex(("127.0.0.1", up)):
                return
        time.sleep(0.2)
    sys.exit(f"{process.args} failed:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def ours(model: Path, folder: Path, name: str = "ours", *more: str) -> Iterator[Server]:
    """`nemo-ext serve`."""
    words = [f"model={model}", "port=0", f"run_dir={folder / name}", "serving.device=cpu", *more]
    with running([sys.executable, "-m", "nemo_ext.cli", "serve", *words], log := folder / f"{name}.log") as process:
        wait(process, log, folder / name / "endpoint.json")
        given = json.loads((folder / name / "endpoint.json").read_text())
        yield Server(given["url"], given["model"], given["key"])


@contextlib.contextmanager
def theirs(python: str, model: Path, folder: Path, name: str, *more: str) -> Iterator[Server]:
    """`transformers serve`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = "import sys; sys.argv[0] = 'transformers'; from transformers.cli.transformers import main; main()"
    words = [python, "-c", start, "serve", str(model), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    with running([*words, *more], log := folder / f"{name}.log") as process:
        wait(process, log, port)
        yield Server(f"http://127.0.0.1:{port}/v1", str(model))


async def post(server: Server, asked: list[dict[str, Any]], at_a_time: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of requests, and the responses."""
    import aiohttp

    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    numbers, responses = itertools.count(), [{} for _ in asked]

    async def worker(session: aiohttp.ClientSession) -> None:
        while (number := next(numbers)) < len(asked):
            path = "chat/completions" if "messages" in asked[number] else "completions"
            body = {"model": server.model, "temperature": 0, **asked[number]}
            async with session.post(f"{server.url}/{path}", json=body) as response:
                said = await response.text()
            assert response.status == 200, said
            responses[number] = json.loads(said)

    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=3600)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(at_a_time)))
        return time.perf_counter() - began, responses


def ask(server: Server, count: int, tokens: int, at_a_time: int) -> tuple[float, list[str]]:
    """Send a number of requests; returns seconds and answers."""
    texts = [f"What is {number} plus {7 * number}?{' Think.' * (number % 8)}" for number in range(count)]
    asked = [{"messages": [{"role": "user", "content": text}], "max_tokens": tokens} for text in texts]
    seconds, made = asyncio.run(post(server, asked, at_a_time))
    assert all(each["usage"]["completion_tokens"] == tokens for each in made), "an answer ended early"
    return seconds, [each["choices"][0]["message"]["content"] for each in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-python", default=sys.executable, help="a Python with transformers[serving]")
    parser.add_argument("--at-a-time", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="threads of each server (default: 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the servers
    rates: dict[tuple[int, str], list[float]] = {}
    texts: dict[tuple[int, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        make_model(model := folder / "tiny")
        # By default, the cache takes most of the memory, and a batch has 8192 tokens, which is slower here.
        batching = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "1024"]
        own, python = stack.enter_context(ours(model, folder)), arguments.transformers_python
        turns = {
            "ours": (own, arguments.at_a_time),
            "ours, sequentially": (own, 1),
            "transformers serve": (stack.enter_context(theirs(python, model, folder, "plain")), arguments.at_a_time),
            "transformers serve, continuous batching": (
                stack.enter_context(theirs(python, model, folder, "batching", *batching)),
                arguments.at_a_time,
            ),
        }
        for number, (tokens, count) in itertools.product(range(-1, arguments.rounds), REQUESTS.items()):
            for name, (server, at_a_time) in turns.items():
                seconds, said = ask(server, count, tokens, at_a_time)
                if number >= 0:  # after a warm-up of all
                    rates.setdefault((tokens, name), []).append(count / seconds)
                    texts[tokens, name] = said
                    print(f"{name}, {tokens} tokens: {count / seconds:.2f} requests/s", file=sys.stderr)
    middle = {key: statistics.median(found) for key, found in rates.items()}
    results = []
    print(f"load at the end {os.getloadavg()[0]:.1f}\n")
    print("| new tokens | | requests/s | tokens/s | ours / its | same answers |\n|---|---|---|---|---|---|")
    for (tokens, name), rate in middle.items():
        ratio = middle[tokens, "ours"] / rate
        same = sum(map(str.__eq__, texts[tokens, "ours"], texts[tokens, name])) / REQUESTS[tokens]
        results.append({"tokens": tokens, "name": name, "requests/s": rate, "ours / its": ratio, "same": same})
        print(f"| {tokens} | {name} | {rate:.2f} | {rate * tokens:.0f} | {ratio:.2f} | {same:.0%} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
