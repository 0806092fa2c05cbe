"""Conversion of a checkpoint's embedding and output layer to the vocabulary of another tokenizer.

        two tokenizers -> tokens as bytes -> for each new token, the old rows whose mean initialises it
        reader         -> the same reader with these embedding and output rows
        other files    -> the same files, with the new tokenizer and its ids

A token in both vocabularies keeps its row bit for bit. A new token's row is the mean of the rows of the old tokens that
its text is tokenised into. For a new special token, which has no text, it is the mean of all rows.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_ext.checkpoint.beside import read_json
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError, Stored
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.data.text.byte_tokenizer import BYTE_NAME, token_bytes
from nemo_ext.data.text.tokenizers import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from nemo_ext.checkpoint.parameters import Piece

TOKENIZER, ABOUT, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken"),
)
"""Patterns of tokenizer files, which are removed when another tokenizer replaces them."""
NewRows = Literal["pieces", "mean", "zero"]
ROLES = ("bos", "eos", "pad")
_SPECIAL = b"\xff special "
"""Prefix of special tokens in byte form; invalid UTF-8, so that no text matches it."""
_ROWS = 4096
"""Number of rows converted to float32 at a time."""
_LONGEST = 64
"""Maximum length in bytes of the old tokens into which a token with invalid UTF-8 is split."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the new embedding and output layer, as means of old rows.

    Attributes:
        old: indices of old rows, concatenated over all new rows.
        starts: start of each new row's indices in `old`; a new row without indices is the mean of all rows, or zero.
        tokens: number of tokens in the old tokenizer, which occupy the first rows.
        zero: whether new rows without indices are zero.
        ids: mapping from config.json keys, such as `eos_token_id`, to the new ids of special tokens.
        identity: digest of both tokenizers.
    """

    old: Sequence[int]
    starts: Sequence[int]
    tokens: int
    zero: bool = False
    ids: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""

    @property
    def size(self) -> int:
        """New vocabulary size."""
        return len(self.starts)

    @property
    def counts(self) -> list[int]:
        """Number of old rows averaged into each new row."""
        ends = [*self.starts[1:], len(self.old)]
        return [end - start for start, end in zip(self.starts, ends, strict=True)]

    def table(self, old: "Tensor") -> "Tensor":
        """Compute the new weight `[size, hidden]` from the old one `[rows, hidden]`, in its dtype (means in fp32)."""
        import torch
        from torch.nn.functional import embedding_bag

        counts = torch.tensor(self.counts)
        new = old.new_zeros(self.size, old.shape[1])
        if not self.zero and (counts == 0).any():
            parts = old[: self.tokens].split(_ROWS)
            new[counts == 0] = (sum(part.float().sum(0) for part in parts) / self.tokens).to(old.dtype)
        first, several = torch.tensor(self.starts), torch.where(counts > 1)[0]
        rows = torch.tensor(self.old, dtype=torch.long)
        new[counts == 1] = old[rows[first[counts == 1]]]
        for some in several.split(_ROWS) if len(several) else ():
            parts = [rows[first[row] : first[row] + counts[row]] for row in some.tolist()]
            used, place = torch.cat(parts).unique(return_inverse=True)
            offsets = torch.tensor([0, *map(len, parts[:-1])]).cumsum(0)
            new[some] = embedding_bag(place, old[used].float(), offsets, mode="mean").to(old.dtype)
        return new

    def summary(self) -> str:
        """Line for the user with the numbers of copied, averaged and newly initialised rows."""
        copied, none = (self.counts.count(number) for number in (1, 0))
        rest = "zero" if self.zero else "the mean of all rows"
        several = self.size - copied - none
        return (
            f"vocabulary: of {self.size:,} rows, {copied:,} are copied, {several:,} are means of pieces, "
            f"{none:,} are {rest}"
        )

    def new_ids(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the token ids of a config.json or generation_config.json to the new vocabulary.

        Ids of tokens that are not in the new vocabulary are dropped. If none remains, the key gets the id that the new
        tokenizer has for this role, or None if it has none. `eos_token_id` always includes the new tokenizer's own.

        Returns:
            The keys that end in `_token_id`, with their new values.
        """
        pairs = zip(self.starts, self.counts, strict=True)
        now = {self.old[start]: row for row, (start, count) in enumerate(pairs) if count == 1}
        ids: dict[str, Any] = {}
        standard = [f"{role}_token_id" for role in ROLES]
        for key in dict.fromkeys([*standard, *(key for key in config if key.endswith("_token_id"))]):
            before = config.get(key)
            several = before if isinstance(before, list) else [before]
            after = [now[number] for number in several if number in now]
            if key in self.ids and (key.startswith("eos") or not after):
                after = list(dict.fromkeys([self.ids[key], *after]))
            if key in config or after:
                ids[key] = after if len(after) > 1 else after[0] if after else None
        return ids


def vocabulary(old: Path, new: Path, *, rows: int, new_rows: NewRows = "pieces") -> Vocabulary:
    """Determine from which old rows the row of each token of a new tokenizer is made.

    Args:
        old: folder with the checkpoint's tokenizer.
        new: folder with the new tokenizer.
        rows: number of rows in the checkpoint's embedding.
        new_rows: initialisation of tokens missing from the old tokenizer: mean of the rows of their old pieces
            (`pieces`), mean of all rows (`mean`), or `zero`.

    Raises:
        CheckpointError: the old tokenizer has more tokens than the checkpoint has rows.
        ValueError: a folder has no tokenizer, or one that is neither BPE nor Unigram.
    """
    before, after = _tokens(old), _tokens(new)
    tokens = max(before.number.values()) + 1
    if tokens > rows:
        raise CheckpointError(
            f"{old}: the tokenizer has ids up to {tokens - 1}, but the checkpoint has only {rows} rows: name the "
            "checkpoint's own tokenizer with old_tokenizer=FOLDER"
        )
    row_of = before.by_bytes()
    sources: list[list[int]] = [[] for _ in range(max(after.number.values()) + 1)]
    for name, number in after.number.items():
        data = after.data[name]
        special = data.startswith(_SPECIAL)
        # The same token may be special in one tokenizer and an added word in the other.
        other = data.removeprefix(_SPECIAL) if special else _SPECIAL + data
        same = before.number[name] if before.data.get(name) == data else row_of.get(data, row_of.get(other))
        if same is not None:
            sources[number] = [same]
        elif new_rows == "pieces" and not special:
            sources[number] = _pieces(before.tokenizer, data, row_of)
    # The new EOS token inherits the row of the old one even if their names differ; likewise BOS and others.
    ids, ids_before = token_ids(new), token_ids(old)
    for key, number in ids.items():
        if not sources[number] and key in ids_before:
            sources[number] = [ids_before[key]]
    starts = [0]
    for rows_of_token in sources[:-1]:
        starts.append(starts[-1] + len(rows_of_token))
    identity = hashlib.sha256(b"".join((folder / TOKENIZER).read_bytes() for folder in (old, new))).hexdigest()
    return Vocabulary(list(chain.from_iterable(sources)), starts, tokens, new_rows == "zero", ids, identity)


def _pieces(tokenizer: "Tokenizer", data: bytes, row_of: Mapping[bytes, int]) -> list[int]:
    """Split a new token's text into old tokens, and return their rows.

    Args:
        data: the new token's text as bytes. Invalid UTF-8 is split greedily into the longest old tokens.
        row_of: mapping from the bytes of each old token to its row.
    """
    try:
        ids: list[int] = tokenizer.encode(data.decode(), add_special_tokens=False).ids
    except UnicodeDecodeError:
        ids, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + _LONGEST), place, -1)
            end = next((end for end in ends if data[place:end] in row_of), None)
            ids += [] if end is None else [row_of[data[place:end]]]
            place = end or place + 1
    return ids


@dataclass(frozen=True)
class _Tokens:
    """Tokenizer and its vocabulary.

    Attributes:
        tokenizer: tokenizer, set not to add padding, spaces or anything else to a string.
        number: mapping from token name to id.
        data: mapping from token name to the bytes that the token stands for.
    """

    tokenizer: "Tokenizer"
    number: Mapping[str, int]
    data: Mapping[str, bytes]

    def by_bytes(self) -> dict[bytes, int]:
        """Return a mapping from bytes to the id of the token that stands for them.

        Of several such tokens, the one with the lowest id is taken; byte tokens such as `<0x41>` only if there is no
        other.
        """
        order = sorted(self.number, key=lambda name: (BYTE_NAME.fullmatch(name) is None, -self.number[name]))
        return {self.data[name]: self.number[name] for name in order}


def _tokens(folder: Path) -> _Tokens:
    from tokenizers import Tokenizer

    written = json.loads(read_tokenizer(folder / TOKENIZER)[0].to_str())
    if written["model"]["type"] not in ("BPE", "Unigram"):
        raise ValueError(
            f"{folder}: the tokenizer is of type {written['model']['type']}, but only BPE and Unigram tokenizers are "
            "supported: choose another tokenizer, or convert without tokenizer=FOLDER"
        )
    byte_level = '"ByteLevel"' in json.dumps(written["decoder"])
    tokenizer = Tokenizer.from_str(json.dumps(_adding_nothing(written)))
    tokenizer.encode_special_tokens = True
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    number = tokenizer.get_vocab(with_added_tokens=True)
    data = {}
    for name in number:
        data[name] = name.encode() if byte_level and name in added else token_bytes(name, byte_level=byte_level)
        if name in added and added[name].special:
            data[name] = _SPECIAL + data[name]
    return _Tokens(tokenizer, number, data)


def _adding_nothing(part: Any) -> Any:
    """Copy part of a tokenizer.json without padding, truncation, dropout and prepended spaces."""
    if isinstance(part, list):
        return [
            _adding_nothing(item) for item in part if not (isinstance(item, dict) and item.get("type") == "Prepend")
        ]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    without = {
        "prepend_scheme": "never",
        "add_prefix_space": False,
        "dropout": None,
        "truncation": None,
        "padding": None,
    }
    return {
        key: without[key] if key in without else value if key == "vocab" else _adding_nothing(value)
        for key, value in part.items()
    }


def token_ids(folder: Path) -> dict[str, int]:
    """Mapping from config.json key (`eos_token_id`, `unk_token_id`, ...) to the id of the token with that role."""
    about = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    known = read_tokenizer(folder / TOKENIZER)[0]
    ids = {}
    for key, name in about.items():
        name = name.get("content") if isinstance(name, dict) else name
        number = known.token_to_id(name) if key.endswith("_token") and isinstance(name, str) else None
        if number is not None:
            ids[f"{key}_id"] = number
    return ids


def replace_files(folder: Path, tokenizer: Path, rows: Vocabulary) -> None:
    """Replace the old tokenizer's files in a folder, and update the token ids in its config files."""
    for pattern in FILES:
        for file in folder.glob(pattern):
            file.unlink()
        for file in tokenizer.glob(pattern):
            if file.is_file() and file.suffix != ".py":
                shutil.copyfile(file, folder / file.name)
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            keys = read_json(folder / name)
            (folder / name).write_text(json.dumps(keys | rows.new_ids(keys), indent=2) + "\n")


class Retokenized:
    """Reader of a checkpoint whose embedding and output layer are converted to another vocabulary.

    Attributes:
        reader: reader of the unchanged checkpoint.
        tensors: mapping from tensor name to shape and type.
        rows: rows of the new vocabulary.
        left_out: number of tensors that do not belong to the model.
    """

    def __init__(self, reader: SafetensorsReader | TorchDistReader, tables: Sequence[str], rows: Vocabulary) -> None:
        self.reader, self.path, self.rows = reader, reader.path, rows
        self.left_out = getattr(reader, "left_out", 0)
        self._tables = [name for name in tables if name in reader.tensors]
        self.tensors = dict(reader.tensors)
        for name in self._tables:
            stored = reader.tensors[name]
            self.tensors[name] = Stored((rows.size, *stored.shape[1:]), stored.dtype)

    def read(self, name: str) -> "Tensor":
        """Read a whole tensor."""
        tensor = self.reader.read(name)
        return self.rows.table(tensor) if name in self._tables else tensor

    def read_piece(self, piece: "Piece") -> "Tensor":
        """Read a piece of a tensor; a piece of the embedding or output layer is always the whole tensor."""
        return self.read(piece.key) if piece.key in self._tables else self.reader.read_piece(piece)

    def files(self) -> Sequence[Path]:
        """Files that hold tensors."""
        return self.reader.files()
