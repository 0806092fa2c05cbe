"""Entry point of one rank of a training run that is evaluated at some of its steps.

    torchrun --nproc-per-node N -m nemo_ext.evaluation.live.rank RUN_DIR/config.yaml

All ranks reach the hooks at the same steps. During an evaluation, rank 0 runs two more threads: an endpoint, and
the evaluation that sends requests to it. Random states, data, weights and buffers are unchanged, so evaluation does
not affect training.
"""

import json
import random
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from nemo_ext.chat.template import end_tokens
from nemo_ext.data.text.tokenizers import vocabulary_of
from nemo_ext.evaluation.live import folder_of, settings_of, tokenizer_of
from nemo_ext.evaluation.store import BITS
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.run_directory import METRICS, read_config, read_metrics
from nemo_ext.megatron import rank

if TYPE_CHECKING:
    import torch

Measured = dict[str, dict[str, float]]
"""Mappings from benchmark to value, under `evaluate` (accuracies) and `evaluate_bits` (bits per byte)."""
_SECONDS_TO_LEAVE = 5.0


class Evaluations:
    """Evaluations of the model during training.

    Args:
        measure: function that evaluates the model behind an endpoint; if None, `nemo_ext.evaluation.job.evaluate`.
    """

    def __init__(self, config: Mapping[str, Any], measure: Callable[..., Mapping[str, Any]] | None = None) -> None:
        self.config, self.measure = config, measure
        self.live = settings_of(config)
        self.run_dir = Path(config["run_dir"])

    def install(self) -> None:
        """Install the hooks in Megatron's training loop: before the first step and after each step."""
        from megatron.training import get_args, get_timers, training

        train, after_step = training.train, training.post_training_step_callbacks

        @wraps(train)
        def with_start(forward_step: Any, model: Any, optimizer: Any, *others: Any, **named: Any) -> Any:
            step = get_args().iteration
            if self._due(step):
                self._at(step, model, optimizer, begun=False)
            return train(forward_step, model, optimizer, *others, **named)

        @wraps(after_step)
        def with_steps(model: Any, optimizer: Any, scheduler: Any, step: int, *others: Any, **named: Any) -> Any:
            result = after_step(model, optimizer, scheduler, step, *others, **named)
            arguments = get_args()
            last = step == arguments.train_iters or step == arguments.exit_interval
            if last or self._due(step):
                get_timers()("interval-time").stop()  # evaluations do not count as step time
                self._at(step, model, optimizer, begun=True)
                get_timers()("interval-time", log_level=0).start(barrier=True)
            return result

        training.train, training.post_training_step_callbacks = with_start, with_steps

    def _due(self, step: int) -> bool:
        return self.live.every is not None and step % self.live.every == 0

    def _at(self, step: int, model: list[Any], optimizer: Any, *, begun: bool) -> None:
        """Evaluate at a step on all ranks, unless results exist; the logging rank writes them to metrics.jsonl.

        `begun` is whether the training loop has run a step.
        """
        import torch
        from megatron.training import get_args, global_vars

        from nemo_ext.megatron.metrics import MetricsWriter

        arguments = get_args()
        results: list[Any] = [_read(folder_of(self.run_dir, step)) if arguments.rank == 0 else None]
        torch.distributed.broadcast_object_list(results, 0)
        if results[0] is None:
            with _gathered(model, optimizer, begun=begun), untouched(model):
                results = [self._evaluate(step, model)]
            torch.distributed.broadcast_object_list(results, 0)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        writer = global_vars._GLOBAL_TENSORBOARD_WRITER
        if results[0] is not None and isinstance(writer, MetricsWriter):
            metrics = self.run_dir / METRICS
            lines = read_metrics(metrics) if metrics.exists() else []
            if not any(line["step"] == step and "evaluate" in line for line in lines):
                writer.add_evaluation(step, results[0])

    def _evaluate(self, step: int, model: list[Any]) -> Measured | None:
        """Evaluate on all ranks; return the results on rank 0, and None on other ranks or if the evaluation failed."""
        from megatron.training import get_args, get_signal_handler

        from nemo_ext.evaluation.live.engine import LiveEngine, LiveModel

        arguments = get_args()
        live = LiveModel(
            model,
            vocabulary=vocabulary_of(self.config) or arguments.padded_vocab_size,
            length=arguments.seq_length,
            tokens=arguments.seq_length * arguments.micro_batch_size,
        )
        if arguments.rank:
            live.follow()
            return None
        signals = get_signal_handler() if arguments.exit_signal_handler else None

        def stopped() -> bool:
            return signals is not None and signals._signal_received

        engine = LiveEngine(live, max_batch=self.live.max_batch, stopped=stopped)
        results: list[dict[str, Any]] = []
        thread = threading.Thread(target=self._measure, args=(engine, step, results), name="evaluation", daemon=True)
        thread.start()
        if engine.run():
            thread.join()
        else:
            print(f"evaluation at step {step}: stopped by a signal", flush=True)
            thread.join(_SECONDS_TO_LEAVE)
            return None
        if not results:
            return None
        for name, entry in results[0]["benchmarks"].items():
            if entry.get("accuracy") is None:
                print(f"evaluation at step {step}: {name}: no score: {entry.get('reasons')}", flush=True)
        return measured(results[0])

    def _measure(self, engine: Any, step: int, results: list[dict[str, Any]]) -> None:
        """Evaluate the model through an endpoint for `engine`, and append the content of results.json to `results`.

        Runs in a thread of rank 0; an error ends the evaluation, not the training.
        """
        try:
            with _endpoint(engine, self.config, self.run_dir) as (address, tokenizer):
                measure = self.measure
                if measure is None:
                    from nemo_ext.evaluation.job import evaluate as measure
                assert measure is not None
                folder = folder_of(self.run_dir, step)
                results.append(dict(measure(self.live.settings, address, folder, tokenizer=tokenizer)))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"evaluation at step {step} failed: {reason}; training continues", flush=True)
        finally:
            engine.close()


def measured(results: Mapping[str, Any]) -> Measured:
    """Extract accuracies and bits per byte from an evaluation's results, without benchmarks that have no score."""
    values: Measured = {"evaluate": {}, "evaluate_bits": {}}
    for name, entry in results["benchmarks"].items():
        if entry.get("accuracy") is not None:
            values["evaluate_bits" if entry.get("metric") == BITS else "evaluate"][name] = float(entry["accuracy"])
    return values


def _read(folder: Path) -> Measured | None:
    from nemo_ext.evaluation.job import RESULTS

    try:
        return measured(json.loads((folder / RESULTS).read_bytes()))
    except FileNotFoundError:
        return None


@contextmanager
def _endpoint(engine: Any, config: Mapping[str, Any], run_dir: Path) -> "Iterator[tuple[Any, Path | None]]":
    """Serve the engine on a free local port, with an API key; yields its address and the tokenizer's folder, if any."""
    from nemo_ext.endpoint.address import Address
    from nemo_ext.serving.app import Api, Served
    from nemo_ext.serving.listen import bind, server, url_of

    tokenizer, ends, folder = _tokenizer(config, run_dir)
    name, key = str(config["model"]["name"]), secrets.token_urlsafe()
    served = Served(name=name, engine=engine, tokenizer=tokenizer, ends=ends, length=engine.model.length)
    bound = bind("127.0.0.1", 0)
    front = server(Api(served).app(key))
    serving = threading.Thread(target=front.run, kwargs={"sockets": [bound]}, name="endpoint", daemon=True)
    serving.start()
    try:
        yield Address(url=url_of("127.0.0.1", bound.getsockname()[1]), model=name, key=key), folder
    finally:
        front.should_exit = front.force_exit = True
        serving.join(_SECONDS_TO_LEAVE)


def _tokenizer(config: Mapping[str, Any], run_dir: Path) -> tuple[Any, frozenset[int], Path | None]:
    """Return the transformers tokenizer, the ids that end an answer, and the tokenizer's folder (None without one)."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from nemo_ext.data.text import byte_tokenizer
    from nemo_ext.data.text.tokenizers import ByteTokenizer
    from nemo_ext.evaluation.live import FOLDER

    tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, ByteTokenizer):
        path, end = byte_tokenizer.write(run_dir / FOLDER / "tokenizer") / "tokenizer.json", byte_tokenizer.EOD
    else:
        path, end = tokenizer.path, tokenizer.eod_token
    folder = path.parent if path.name == "tokenizer.json" else None
    if folder is not None and (folder / "tokenizer_config.json").exists():
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    else:
        loaded = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=end)
    if loaded.chat_template is None:
        loaded.chat_template = byte_tokenizer.TEMPLATE
    return loaded, end_tokens(loaded) | {tokenizer.eod}, folder


@contextmanager
def _gathered(model: list[Any], optimizer: Any, *, begun: bool) -> Iterator[None]:
    """Gather all weights before the block if Megatron overlaps their all-gather with the forward pass.

    Megatron's own evaluation does the same. `begun` is whether training has run a step; before, there is nothing to
    gather.
    """
    from megatron.training import get_args, training

    if not training.should_disable_forward_pre_hook(get_args()):
        yield
        return
    # Before the first step, every rank has all weights, and nothing needs to be gathered.
    training.disable_forward_pre_hook(model, **({"optimizer": optimizer} if begun else {"param_sync": False}))
    try:
        yield
    finally:
        training.enable_forward_pre_hook(model)


@contextmanager
def untouched(model: "list[torch.nn.Module]") -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards restore all state that training depends on."""
    import torch
    from megatron.core.tensor_parallel.random import _fork_rng
    from megatron.core.utils import get_model_config

    modes = [(module, module.training) for chunk in model for module in chunk.modules()]
    # Not `buffers()`: Megatron's DDP wrapper has another attribute of that name.
    current = [buffer for chunk in model for module in chunk.modules() for buffer in module._buffers.values()]
    buffers = [(buffer, buffer.clone()) for buffer in current if buffer is not None]
    config = get_model_config(model[0])
    timers, config.timers = config.timers, None
    numbers, state = np.random.get_state(), random.getstate()
    try:
        for chunk in model:
            chunk.eval()
        with _fork_rng(), torch.no_grad():
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(state)
        config.timers = timers
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def run(config_path: str) -> NoReturn:
    """Train as `nemo_ext.megatron.rank` does, with evaluations at the steps given by the config."""
    rank.run(config_path, prepare=Evaluations(read_config(Path(config_path))).install)


if __name__ == "__mp_main__":
    rank.guard_helper()
if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # a rank whose torchrun or srun has died saves and exits
    run(sys.argv[1])
