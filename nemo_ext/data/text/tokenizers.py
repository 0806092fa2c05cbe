"""Tokenizers for training data: UTF-8 bytes, or any Hugging Face `tokenizer.json`.

Both turn text into ids without special tokens; whoever writes a document appends `eod`. Another process can rebuild a
tokenizer from `describe()`, and two tokenizers with equal `identity` produce the same ids.
"""

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.text.indexed_dataset import Ids, ids_type
from nemo_ext.job.job import JobFailed
from nemo_ext.job.settings import nearest, prefixed_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_COMPARED_ONE_IN = 256

COMMON_EOD = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class ByteTokenizer:
    """Byte tokenizer, which needs no file and encodes any text: ids 0 to 255 are the bytes, and 256 ends a document.

    Matches Megatron's NullTokenizer with vocab_size 257, whose eod is the last id
    (megatron/core/tokenizers/text/libraries/null_tokenizer.py).
    """

    vocab_size = 257
    eod = 256
    identity = "byte-257"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text, without eod."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(ids_type(self.vocab_size)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids without eod; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return bytes(token for token in ids if token != self.eod).decode(errors="replace")

    def describe(self) -> dict[str, object]:
        """Return a mapping from which `load_tokenizer` rebuilds this tokenizer."""
        return {"kind": "byte"}


class HuggingFaceTokenizer:
    """Tokenizer read from a `tokenizer.json` by the `tokenizers` library, without transformers or network access.

    The file's truncation, padding and added special tokens are switched off: training documents are never truncated,
    and only `eod` is added. Text that spells a special token (`<|endoftext|>` in a web page) is encoded as ordinary
    text unless `parse_special_tokens` is set, which text with chat markers requires.

    Args:
        eod: Name of the token that ends a document. By default, `eos_token` from the tokenizer_config.json in the same
            directory, as in Megatron and transformers, or otherwise the first token of `COMMON_EOD` in the vocabulary.
        parse_special_tokens: True to encode special token names in a text as those tokens.

    Raises:
        ValueError: The file is missing or unreadable, or has no end-of-document token.
    """

    def __init__(self, path: str | Path, *, eod: str | None = None, parse_special_tokens: bool = False) -> None:
        path = Path(path).expanduser()
        self.path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, content = read_tokenizer(self.path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        self.parse_special_tokens = parse_special_tokens
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.token_count = len(vocabulary)
        self.eod_token = _end_token(vocabulary, self.path, eod)
        self.eod = vocabulary[self.eod_token]
        options = f"{self.eod_token}\0{parse_special_tokens}".encode()
        self.identity = "huggingface-" + hashlib.sha256(content + b"\0" + options).hexdigest()[:16]

    @cached_property
    def _ids_of(self) -> Callable[[str], npt.NDArray[np.uint32]]:
        return ids_of(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text, without eod or other special tokens."""
        return [self._ids_of(text).astype(ids_type(self.vocab_size)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids without eod, as far as the tokenizer can restore the text."""
        without_eod = [int(token) for token in ids if token != self.eod]
        return self._tokenizer.decode(without_eod, skip_special_tokens=False)

    def describe(self) -> dict[str, object]:
        """Return a mapping from which `load_tokenizer` rebuilds this tokenizer."""
        return {
            "kind": "huggingface",
            "path": str(self.path),
            "eod": self.eod_token,
            "parse_special_tokens": self.parse_special_tokens,
        }


Tokenizer = ByteTokenizer | HuggingFaceTokenizer

_KEYS: dict[str, tuple[str, ...]] = {"byte": (), "huggingface": ("path", "eod", "parse_special_tokens")}


def named_tokenizer(name: str) -> dict[str, object]:
    """Return a config for `load_tokenizer`, given `byte` or the path of a Hugging Face tokenizer."""
    return {"kind": "byte"} if name == "byte" else {"kind": "huggingface", "path": name}


def load_tokenizer(config: object, where: str = "data.tokenizer") -> Tokenizer:
    """Build a tokenizer from `{"kind": "byte"}` or `{"kind": "huggingface", "path": ..., "eod": ...}`.

    Args:
        where: config key of the tokenizer, for messages.

    Raises:
        ValueError: A kind or key is unknown, a value has the wrong type, or a file cannot be used.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a mapping such as {{kind: byte}}, not {config!r}")
    with prefixed_errors(where):
        return _tokenizer(config)


def _tokenizer(config: Mapping[Any, Any]) -> Tokenizer:
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"unknown tokenizer kind {kind!r}: {nearest(str(kind), _KEYS)}")
    for key in config:
        if key != "kind" and key not in _KEYS[kind]:
            raise ValueError(f"unknown key {key!r} of a {kind!r} tokenizer: {nearest(key, ['kind', *_KEYS[kind]])}")
    if kind == "byte":
        return ByteTokenizer()
    path, eod, parse = config.get("path"), config.get("eod"), config.get("parse_special_tokens", False)
    if not isinstance(path, str | Path) or not str(path):
        raise ValueError(f"path of a 'huggingface' tokenizer must be the path of its tokenizer.json, not {path!r}")
    if eod is not None and not isinstance(eod, str):
        raise ValueError(f"tokenizer eod must be the name of a token, not {eod!r}")
    if not isinstance(parse, bool):
        raise ValueError(f"tokenizer parse_special_tokens must be true or false, not {parse!r}")
    return HuggingFaceTokenizer(path, eod=eod, parse_special_tokens=parse)


def megatron_arguments(tokenizer: Tokenizer, *, ids_only: bool = False) -> dict[str, object]:
    """Return the Megatron arguments (snake_case) that give Megatron's tokenizer this vocabulary size and eod.

    Training on tokenised files needs nothing else from a tokenizer. `ids_only` selects Megatron's NullTokenizer with
    the same size and eod instead of a Hugging Face tokenizer, so that transformers is not required. Otherwise Megatron
    loads the files with transformers, can decode ids, and saves the files in checkpoints.

    Raises:
        ValueError: Megatron would read a different eod or vocabulary size from the tokenizer's directory.
    """
    if isinstance(tokenizer, ByteTokenizer) or ids_only:
        arguments: dict[str, object] = {"tokenizer_type": "NullTokenizer", "vocab_size": tokenizer.vocab_size}
        if tokenizer.eod != tokenizer.vocab_size - 1:
            arguments["null_tokenizer_eod_id"] = tokenizer.eod
        return arguments
    directory = tokenizer.path.parent
    # build_tokenizer passes the path to AutoTokenizer, which requires a directory with both files, and uses eos_token
    # as eod (megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py).
    if tokenizer.path.name != "tokenizer.json":
        raise ValueError(
            f"Megatron reads only tokenizer.json: rename {tokenizer.path}, or pass ids_only=True to megatron_arguments"
        )
    eos = _configured_eos(tokenizer.path)
    if eos != tokenizer.eod_token:
        raise ValueError(
            f"{directory / 'tokenizer_config.json'} has eos_token={eos!r}, which Megatron uses as eod, but the data "
            f"ends documents with {tokenizer.eod_token!r}: correct eos_token, or pass ids_only=True to "
            "megatron_arguments"
        )
    if tokenizer.token_count != tokenizer.vocab_size:
        raise ValueError(
            f"{tokenizer.path} has {tokenizer.token_count} tokens, but ids up to {tokenizer.vocab_size - 1}, and "
            "Megatron would size the embedding by the number of tokens: pass ids_only=True to megatron_arguments"
        )
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(directory)}


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of token ids of a training config's model; None if Megatron derives it from the data.

    This is the smaller of `model.vocab_size` and `megatron.padded_vocab_size`; None if neither is set.
    """
    sizes = ((config.get("model") or {}).get("vocab_size"), config["megatron"].get("padded_vocab_size"))
    return min((int(size) for size in sizes if size), default=None)


def check_vocabulary(ids: int, config: Mapping[str, Any]) -> None:
    """Check that the data's tokenizer has no more ids than the model.

    Raises:
        ValueError: the tokenizer has more ids.
    """
    rows = vocabulary_of(config)
    if rows is not None and ids > rows:
        raise ValueError(
            f"the tokenizer has {ids} ids, but the model has {rows} (model.vocab_size, or megatron.padded_vocab_size "
            "if that is not set): use the model's tokenizer, or raise that setting"
        )


def read_tokenizer(path: Path) -> tuple["RustTokenizer", bytes]:
    """Read a tokenizer.json with the `tokenizers` library; return the tokenizer and the file's bytes.

    Raises:
        ValueError: The file is missing, or the library cannot read it.
    """
    from tokenizers import Tokenizer as RustTokenizer

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({os.strerror(error.errno or 0)}): give the path of a tokenizer.json"
        ) from error
    try:
        return RustTokenizer.from_str(content.decode()), content
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{path} is not a tokenizer.json that the tokenizers library can read ({error}); convert a "
            "SentencePiece or tiktoken model first: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error


def ids_of(tokenizer: "RustTokenizer") -> Callable[[str], npt.NDArray[np.uint32]]:
    """Return a function that encodes one text, without the tokens that a post-processor adds.

    Uses fastokens, which is many times faster and gives the same ids, if it is installed and supports the tokenizer.
    The first text and about one in 256 are encoded with both libraries, and a difference raises JobFailed. The
    tokenizer must not be changed afterwards.
    """

    def by_tokenizers(text: str) -> npt.NDArray[np.uint32]:
        # A batch of one text uses one core; the caller determines the number of cores by its number of processes.
        return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    try:
        from fastokens import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_json_str(tokenizer.to_str())
    except (ImportError, ValueError):  # not installed, or a part of the tokenizer is not supported
        return by_tokenizers
    numbers, ordinary = itertools.count(), tokenizer.encode_special_tokens

    def is_compared(text: str) -> bool:
        return next(numbers) == 0 or zlib.crc32(text.encode(errors="surrogatepass")) % _COMPARED_ONE_IN == 0

    def by_fastokens(text: str) -> npt.NDArray[np.uint32]:
        try:
            ids = np.frombuffer(fast.encode_batch_flat([text], split_special_tokens=ordinary)[0], dtype=np.uint32)
        except Exception:  # a text that fastokens cannot encode
            return by_tokenizers(text)
        if is_compared(text) and not np.array_equal(ids, by_tokenizers(text)):
            raise JobFailed(
                f"fastokens and tokenizers encode {text[:60]!r}... differently: uninstall fastokens, remove the output "
                "of this job and start over"
            )
        return ids

    return by_fastokens


def _end_token(vocabulary: Mapping[str, int], path: Path, eod: str | None) -> str:
    name = eod or _configured_eos(path)
    if name is None:
        name = next((common for common in COMMON_EOD if common in vocabulary), None)
    if name is None:
        raise ValueError(
            f"tokenizer {path} has none of the tokens {', '.join(COMMON_EOD)}: set eod to one of its tokens"
        )
    if name not in vocabulary:
        special = [token for token in vocabulary if token.startswith("<")]
        raise ValueError(f"tokenizer {path} has no token {name!r} for eod; {nearest(name, special[:50])}")
    return name


def _configured_eos(path: Path) -> str | None:
    """Return the name of `eos_token` in the tokenizer_config.json next to a tokenizer.json; None if there is none."""
    config_path = path.parent / "tokenizer_config.json"
    try:
        config = json.loads(config_path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{config_path} cannot be read ({error}): correct or remove it") from error
    token = config.get("eos_token") if isinstance(config, dict) else None
    # Older files store an AddedToken as a mapping.
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None
