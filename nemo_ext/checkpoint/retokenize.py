"""A checkpoint with the vocabulary of another tokenizer: rows of the embedding and the output layer.

        two tokenizers -> tokens as bytes -> for each new token the old rows that its row is the mean of
        a reader       -> the same reader with tables of these rows
        files beside   -> the same files with the new tokenizer's, and its ids

A token that both have keeps its row bit for bit. A new one gets the mean of the rows of the pieces that the old
tokenizer cuts its text into; special tokens, which have no text, the mean of all.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Files of a tokenizer, which go when another takes its place."""
NewRows = Literal["pieces", "mean", "zero"]
ROLES = ("bos", "eos", "pad")
_SPECIAL = b"\xff special "
"""Beginning of a special token among tokens as bytes: no text has it."""
_ROWS = 4096
"""Rows that are there in float32 at a time."""
_LONGEST = 64
"""Most bytes of an old token that a token without a text is cut into."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the new tables.

    Attributes:
        old: numbers of old rows, of all new rows one after the other.
        starts: where each new row's begin in them; a row without any is the mean of all, or zero.
        tokens: number of the old tokenizer's tokens, whose rows come first.
        zero: True if a row without old ones is zero.
        ids: new ids of the tokens that begin, end and pad a text, by their keys of config.json.
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
        """Number of new rows."""
        return len(self.starts)

    @property
    def counts(self) -> list[int]:
        """Number of old rows of each new row."""
        ends = [*self.starts[1:], len(self.old)]
        return [end - start for start, end in zip(self.starts, ends, strict=True)]

    def table(self, old: "Tensor") -> "Tensor":
        """The new table `[size, hidden]` of an old one `[rows, hidden]`, in its type; means are taken in float32."""
        import torch
        from torch.nn.functional import embedding_bag

        counts = torch.tensor(self.counts)
        made = old.new_zeros(self.size, old.shape[1])
        if not self.zero and (counts == 0).any():
            parts = old[: self.tokens].split(_ROWS)
            made[counts == 0] = (sum(part.float().sum(0) for part in parts) / self.tokens).to(old.dtype)
        first, several = torch.tensor(self.starts), torch.where(counts > 1)[0]
        rows = torch.tensor(self.old, dtype=torch.long)
        made[counts == 1] = old[rows[first[counts == 1]]]
        for some in several.split(_ROWS) if len(several) else ():
            parts = [rows[first[row] : first[row] + counts[row]] for row in some.tolist()]
            used, place = torch.cat(parts).unique(return_inverse=True)
            offsets = torch.tensor([0, *map(len, parts[:-1])]).cumsum(0)
            made[some] = embedding_bag(place, old[used].float(), offsets, mode="mean").to(old.dtype)
        return made

    def told(self) -> str:
        """One line for the user."""
        kept, none = (self.counts.count(number) for number in (1, 0))
        rest = "zero" if self.zero else "the mean of all"
        several = self.size - kept - none
        return f"vocabulary: {kept:,} of {self.size:,} rows are old ones, {several:,} means of pieces, {none:,} {rest}"

    def new_ids(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """The ids of a config.json or generation_config.json in the new vocabulary.

        Args:
            kept: the file's keys; an id that the new tokenizer has no token for goes.
        """
        pairs = zip(self.starts, self.counts, strict=True)
        now = {self.old[start]: row for row, (start, count) in enumerate(pairs) if count == 1}
        found: dict[str, Any] = {}
        own = [f"{role}_token_id" for role in ROLES]
        for key in dict.fromkeys([*own, *(key for key in kept if key.endswith("_token_id"))]):
            before = kept.get(key)
            several = before if isinstance(before, list) else [before]
            after = [now[each] for each in several if each in now]
            if key in self.ids and (key.startswith("eos") or not after):
                after = list(dict.fromkeys([self.ids[key], *after]))
            if key in kept or after:
                found[key] = after if len(after) > 1 else after[0] if after else None
        return found


def vocabulary(old: Path, new: Path, *, rows: int, new_rows: NewRows = "pieces") -> Vocabulary:
    """Rows for the tokens of another tokenizer.

    Args:
        old: folder of the checkpoint's tokenizer.
        new: folder of the tokenizer that the new tables are for.
        rows: number of rows that the checkpoint has.
        new_rows: row of a token that the old tokenizer lacks: mean of its old pieces' rows, mean of all, or zero.

    Raises:
        CheckpointError: the old tokenizer has more tokens than the checkpoint has rows.
        ValueError: a folder has no tokenizer, or one whose tokens are no pieces of text.
    """
    before, after = _tokens(old), _tokens(new)
    tokens = max(before.number.values()) + 1
    if tokens > rows:
        raise CheckpointError(
            f"{old}: its tokenizer has ids up to {tokens - 1}, the checkpoint {rows} rows: name the checkpoint's own, "
            "old_tokenizer=FOLDER"
        )
    row_of = before.by_bytes()
    found: list[list[int]] = [[] for _ in range(max(after.number.values()) + 1)]
    for name, number in after.number.items():
        data = after.data[name]
        special = data.startswith(_SPECIAL)
        # The same token may be special in one tokenizer and an added word in the other.
        other = data.removeprefix(_SPECIAL) if special else _SPECIAL + data
        same = before.number[name] if before.data.get(name) == data else row_of.get(data, row_of.get(other))
        if same is not None:
            found[number] = [same]
        elif new_rows == "pieces" and not special:
            found[number] = _pieces(before.tokenizer, data, row_of)
    # A token that ends a text takes over from the one that did, whatever its name.
    ids, ids_before = token_ids(new), token_ids(old)
    for key, number in ids.items():
        if not found[number] and key in ids_before:
            found[number] = [ids_before[key]]
    starts = [0]
    for each in found[:-1]:
        starts.append(starts[-1] + len(each))
    identity = hashlib.sha256(b"".join((folder / TOKENIZER).read_bytes() for folder in (old, new))).hexdigest()
    return Vocabulary([one for each in found for one in each], starts, tokens, new_rows == "zero", ids, identity)


def _pieces(tokenizer: "Tokenizer", data: bytes, row_of: Mapping[bytes, int]) -> list[int]:
    """Old rows of a text; bytes that are no text are cut into the longest old tokens from left to right."""
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
    """A tokenizer that cuts texts without adding to them; its tokens' ids and bytes by name."""

    tokenizer: "Tokenizer"
    number: Mapping[str, int]
    data: Mapping[str, bytes]

    def by_bytes(self) -> dict[bytes, int]:
        """Id of each token's bytes: the lowest, of a single byte's `<0x41>` only where there is no `A`."""
        order = sorted(self.number, key=lambda name: (BYTE_NAME.fullmatch(name) is None, -self.number[name]))
        return {self.data[name]: self.number[name] for name in order}


def _tokens(folder: Path) -> _Tokens:
    from tokenizers import Tokenizer

    written = json.loads(read_tokenizer(folder / TOKENIZER)[0].to_str())
    if written["model"]["type"] not in ("BPE", "Unigram"):
        raise ValueError(
            f"{folder}: {written['model']['type']}: tokens that are no pieces of a text have no rows to share"
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
    """A part of a tokenizer.json without padding, truncation, chance, and spaces before a text."""
    if isinstance(part, list):
        return [
            _adding_nothing(each) for each in part if not (isinstance(each, dict) and each.get("type") == "Prepend")
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
    """Ids of the tokens that a tokenizer names (`eos_token`, `unk_token`, ...), by their keys of config.json."""
    about = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    known = read_tokenizer(folder / TOKENIZER)[0]
    found = {}
    for key, name in about.items():
        name = name.get("content") if isinstance(name, dict) else name
        number = known.token_to_id(name) if key.endswith("_token") and isinstance(name, str) else None
        if number is not None:
            found[f"{key}_id"] = number
    return found


def replace_files(folder: Path, tokenizer: Path, rows: Vocabulary) -> None:
    """Put a tokenizer's files in place of another's, and its ids into the configs beside them.

    Args:
        folder: folder with the old tokenizer's files, which go.
        tokenizer: folder of the new tokenizer.
        rows: the vocabulary.
    """
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
    """A checkpoint of either kind, in which some tables have the rows of another vocabulary.

    Attributes:
        reader: the checkpoint as it is.
        tensors: name -> shape and type.
        path: its folder.
        rows: rows of the tables.
        left_out: number of tensors that are not the model's.
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
        """One whole tensor."""
        tensor = self.reader.read(name)
        return self.rows.table(tensor) if name in self._tables else tensor

    def read_piece(self, piece: "Piece") -> "Tensor":
        """A part of a tensor; tables are always whole."""
        return self.read(piece.key) if piece.key in self._tables else self.reader.read_piece(piece)

    def files(self) -> Sequence[Path]:
        """The files that hold tensors."""
        return self.reader.files()
