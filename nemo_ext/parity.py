"""Parity check of a conversion, which compares the logits of transformers and Megatron.

real text -> prompts of at least 16 tokens -> both models in fp32 -> logit differences, in parity.json
"""

import importlib.util
import json
import logging
import random
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.checkpoint.beside import PARITY, is_hugging_face
from nemo_ext.checkpoint.convert import run as conversion
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.checkpoint.start import description_of, with_model
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.data.streams import sources_of
from nemo_ext.data.text.indexed_dataset import Ids
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.vocabulary.sample import PIECE, draw
from nemo_ext.data.vocabulary.settings import Weighted
from nemo_ext.job.config import compose, hydra_value
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.settings import STRICT, Place, Whole, checked

SHORTEST = 16
"""Minimum length of a prompt, in tokens."""
TEXT = "local_text"
"""Name of a config in hydra_conf/data whose text is real and available on every machine."""
_CHARACTERS = 16
"""Number of characters read for each token of a prompt; few tokens are longer."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Section `parity` of the convert job.

    Attributes:
        prompts: number of prompts; 0 turns the comparison off.
        data: text files as for `nemo-ext tokenize input=`; None for `TEXT`.
        longest: maximum length of a prompt, in tokens.
        tolerance: maximum allowed absolute difference between two logits.
        seed: random seed for the choice of prompts and their lengths.
    """

    prompts: Whole
    data: Place | None
    longest: Annotated[int, Field(ge=SHORTEST)]
    tolerance: Annotated[float, Field(gt=0)]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences between two models' logits.

    Attributes:
        prompts: number of prompts.
        tokens: total number of tokens, at each of which all logits are compared.
        largest: largest absolute difference between two logits.
        mean: mean absolute difference.
        equal_tokens: number of positions at which both models predict the same most likely next token.
        deviation: standard deviation of transformers' logits, as a reference.
    """

    prompts: int
    tokens: int
    largest: float
    mean: float
    equal_tokens: int
    deviation: float

    def summary(self) -> str:
        """Summarise the differences in one line for the user."""
        return (
            f"parity: {self.prompts} prompts, {self.tokens:,} tokens in fp32: logits differ by at most "
            f"{self.largest:.2g}, on average {self.mean:.2g} (their standard deviation is {self.deviation:.2g}); "
            f"{self.equal_tokens:,} of {self.tokens:,} most likely tokens are equal"
        )


def read_settings(config: Mapping[str, Any]) -> Settings | None:
    """Read the `parity` section of a convert job's config; return None if no prompts are to be compared.

    Raises:
        ValueError: a setting is invalid, the conversion changes the model's outputs, or transformers is missing.
    """
    settings = checked(Settings, config["parity"], "parity")
    if not settings.prompts:
        return None
    for key, none in (("tokenizer", None), ("dtype", None), ("change_rope", False)):
        if config[key] != none:
            raise ValueError(
                f"parity.prompts cannot be combined with {key}={config[key]}, which changes the model; remove one"
            )
    source = Path(str(config["from"])).expanduser()
    if is_hugging_face(source) == (config["to_format"] == "huggingface") and is_hugging_face(source):
        raise ValueError("parity.prompts compares transformers with Megatron: remove to_format=huggingface")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("parity.prompts requires transformers: pip install 'transformers>=5.0'")
    return settings


def convert(config: Mapping[str, Any]) -> None:
    """Run the `convert` job, and compare the logits of source and target if `parity.prompts` is not 0.

    Raises:
        ValueError: a setting is invalid, or the logits differ by more than the tolerance.
    """
    settings = read_settings(config) if config["parity"]["prompts"] else None
    conversion(config)
    if settings is not None and not config["dry_run"]:
        run(config, settings)


def run(config: Mapping[str, Any], settings: Settings) -> None:
    """Compare source and target of a finished conversion, and write parity.json to the target folder.

    Raises:
        ValueError: the logits differ by more than the tolerance, or there is no text for the prompts.
    """
    source, to = (Path(str(config[key])).expanduser() for key in ("from", "to"))
    folder, checkpoint = (source, to) if is_hugging_face(source) else (to, source)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"parity.prompts requires a tokenizer, but {folder} has no tokenizer.json: set files_from=FOLDER"
        )
    parity = compare(folder, checkpoint, prompts_of(settings, folder), iteration=config["iteration"])
    record = {"huggingface": str(folder), "megatron": str(checkpoint), **asdict(settings), **asdict(parity)}
    write_text(to / PARITY, json.dumps(record, indent=1) + "\n")
    notice(parity.summary())
    if not parity.largest <= settings.tolerance:  # also true for NaN
        raise ValueError(
            f"logits of {source} and {to} differ by {parity.largest:.3g}, more than parity.tolerance="
            f"{settings.tolerance:g} (details: {to / PARITY}): do not use {to}, or raise the tolerance if this is "
            "rounding"
        )


def prompts_of(settings: Settings, folder: Path) -> list[Ids]:
    """Draw prompts as token ids: excerpts of real text at random positions and of random lengths.

    Args:
        settings: number, lengths, text and seed of the prompts.
        folder: Hugging Face folder with the tokenizer.

    Raises:
        ValueError: the text cannot be read, or is too short.
    """
    words = [f"data={TEXT}"] if settings.data is None else [f"input={hydra_value(settings.data)}"]
    sources = sources_of(compose("tokenize", words), Path("data"), own=Path("data/prompts"))
    total_weight = sum(weight for _, weight in sources.values())
    pieces = [
        piece
        for name, (source, weight) in sources.items()
        for piece in draw(
            Weighted(name=name, source=source, share=weight / total_weight),
            train=round(settings.prompts * PIECE * weight / total_weight),
            held_out=0,
            seed=settings.seed,
        ).train
    ]
    random_source, tokenizer, prompts = random.Random(settings.seed), HuggingFaceTokenizer(folder), list[Ids]()
    for _ in range(10 * settings.prompts if pieces else 0):
        piece, length = random_source.choice(pieces), random_source.randint(SHORTEST, settings.longest)
        start = random_source.randrange(max(1, len(piece) - _CHARACTERS * length))
        ids = tokenizer.encode([piece[start : start + _CHARACTERS * length]])[0][:length]
        prompts += [ids] if len(ids) >= SHORTEST else []
        if len(prompts) == settings.prompts:
            return prompts
    raise ValueError(
        f"parity.data={settings.data or TEXT}: only {len(prompts)} of {settings.prompts} prompts have at least "
        f"{SHORTEST} tokens; provide more text"
    )


def compare(folder: Path, checkpoint: Path, prompts: list[Ids], *, iteration: int | None = None) -> Parity:
    """Compare the logits of a Hugging Face model and its Megatron conversion, running one prompt at a time in fp32.

    Both models are in memory at the same time (8 bytes per parameter).

    Args:
        folder: Hugging Face folder.
        checkpoint: Megatron run directory, checkpoints directory or single checkpoint.
        prompts: token ids of each prompt.
        iteration: iteration of the checkpoint; None for the newest.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as its_logging

    its_logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Megatron about missing packages
        from nemo_ext.megatron.session import build_model, data_parallel, put_tensors

    description = description_of(checkpoint).without_prediction()  # transformers ignores it
    config = with_model(compose("train", ["precision=fp32"]), description, "parity")
    config["model"]["backend"] = "local"
    config["megatron"]["moe_grouped_gemm"] = False
    reader = TorchDistReader(checkpoint_folder(checkpoint, iteration))
    largest, total, deviation, equal, count = 0.0, 0.0, 0.0, 0, 0
    with data_parallel(), torch.inference_mode(), progress_of("comparing", len(prompts), unit="prompts") as advance:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = build_model(config)
        put_tensors(model, _Tensors(reader))
        model.eval()
        device = next(model.parameters()).device
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=may_run_code(str(folder), {})
        )
        reference.to(device).eval()
        for ids in prompts:
            tokens = torch.tensor([ids.tolist()], device=device)
            expected = reference(tokens, use_cache=False).logits[0]
            positions = torch.arange(tokens.shape[1], device=device)[None]
            logits = model(tokens, positions, None)[0, :, : expected.shape[-1]]
            difference = (logits - expected).abs()
            # Not Python's max(), which would ignore NaN.
            largest = float(torch.tensor([largest, float(difference.max())]).max())
            total += float(difference.mean(dtype=torch.float64)) * len(ids)
            deviation += float(expected.std()) * len(ids)
            equal += int((logits.argmax(-1) == expected.argmax(-1)).sum())
            count += len(ids)
            advance(1)
    return Parity(
        prompts=len(prompts),
        tokens=count,
        largest=largest,
        mean=total / count,
        equal_tokens=equal,
        deviation=deviation / count,
    )


class _Tensors(Mapping[str, Any]):
    """Mapping from names to a checkpoint's tensors, which are read on access."""

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Any:
        return self._reader.read(name)

    def __iter__(self) -> Any:
        return iter(self._reader.tensors)

    def __len__(self) -> int:
        return len(self._reader.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.tensors
