"""A checkpoint with the vocabulary of another tokenizer: rows of the embedding and the output layer.

        two tokenizers -> tokens as bytes -> for each new token the old rows that its row is the mean of
        a reader       -> the same reader with tables of these rows

A token that both have keeps its row bit for bit. A new one gets the mean of the rows of the pieces that the old
tokenizer cuts its text into; special tokens, which have no text, the mean of all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError, Stored
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.data.text.byte_tokenizer import letters
from nemo_ext.data.text.tokenizers import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from nemo_ext.checkpoint.parameters import Piece

TOKENIZER, ABOUT = "tokenizer.json", "tokenizer_config.json"
NewRows = Literal["pieces", "mean", "zero"]
_SPECIAL = b"\xff special "
"""Beginning of a special token among tokens as bytes: no text has it."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the new tables.

    Attributes:
        old: numbers of old rows, of all new rows one after the other.
        starts: where each new row's begin in them; a row without any is the mean of all, or zero.
        tokens: number of old rows that stand for tokens.
        zero: True if a row without old ones is zero.
    """

    old: Sequence[int]
    starts: Sequence[int]
    tokens: int
    zero: bool = False

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
        if not self.zero:
            made[counts == 0] = old[: self.tokens].float().mean(0).to(old.dtype)
        first, several = torch.tensor(self.starts), torch.where(counts > 1)[0]
        rows = torch.tensor(self.old, dtype=torch.long)
        made[counts == 1] = old[rows[first[counts == 1]]]
        for some in several.split(4096) if len(several) else ():  # so that no more than some rows are there in float32
            parts = [rows[first[row] : first[row] + counts[row]] for row in some.tolist()]
            used, place = torch.cat(parts).unique(return_inverse=True)
            offsets = torch.tensor([0, *map(len, parts[:-1])]).cumsum(0)
            made[some] = embedding_bag(place, old[used].float(), offsets, mode="mean").to(old.dtype)
        return made

    def told(self) -> str:
        """One line for the user."""
        counts = self.counts
        kept, several, none = (sum(map(test, counts)) for test in (_is_one, _is_several, _is_none))
        rest = "zero" if self.zero else "the mean of all"
        return f"vocabulary: {kept:,} of {self.size:,} rows are old ones, {several:,} means of pieces, {none:,} {rest}"


def _is_one(count: int) -> bool:
    return count == 1


def _is_several(count: int) -> bool:
    return count > 1


def _is_none(count: int) -> bool:
    return count == 0


def vocabulary(old: Path, new: Path, *, tokens: int, new_rows: NewRows = "pieces") -> Vocabulary:
    """Rows for the tokens of another tokenizer.

    Args:
        old: folder of the checkpoint's tokenizer.
        new: folder of the tokenizer that the new tables are for.
        tokens: number of rows that the checkpoint has for tokens.
        new_rows: row of a token that the old tokenizer lacks: mean of its old pieces' rows, mean of all, or zero.

    Raises:
        CheckpointError: the old tokenizer has more tokens than the checkpoint has rows.
        ValueError: a folder has no tokenizer.
    """
    before, after = (read_tokenizer(folder / TOKENIZER)[0] for folder in (old, new))
    row_of = {data: number for number, data in sorted(_as_bytes(before).items(), reverse=True)}
    if max(row_of.values()) >= tokens:
        raise CheckpointError(
            f"{old}: its tokenizer has ids up to {max(row_of.values())}, the checkpoint {tokens} rows: name the "
            "checkpoint's own, old_tokenizer=FOLDER"
        )
    before.encode_special_tokens = True
    wanted = _as_bytes(after)
    rows: list[list[int]] = [[] for _ in range(max(wanted) + 1)]
    for number, data in wanted.items():
        special = data.startswith(_SPECIAL)
        # The same token may be special in one tokenizer and an added word in the other.
        other = data.removeprefix(_SPECIAL) if special else _SPECIAL + data
        if (row := row_of.get(data, row_of.get(other))) is not None:
            rows[number] = [row]
        elif new_rows == "pieces" and not special:
            rows[number] = _pieces(before, data, row_of)
    starts = [0]
    for each in rows[:-1]:
        starts.append(starts[-1] + len(each))
    return Vocabulary([one for each in rows for one in each], starts, tokens, zero=new_rows == "zero")


def _pieces(tokenizer: "Tokenizer", data: bytes, row_of: Mapping[bytes, int]) -> list[int]:
    """Old rows of a text; bytes that are no text are looked up one by one."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [row_of[byte] for byte in (data[place : place + 1] for place in range(len(data))) if byte in row_of]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _as_bytes(tokenizer: "Tokenizer") -> dict[int, bytes]:
    """The text of each token as bytes, so that tokenizers of different kinds can be compared."""
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    byte_of = {letter: bytes([byte]) for byte, letter in enumerate(letters())}
    found = {}
    for name, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            special = tokenizer.get_added_tokens_decoder()[number].special
            found[number] = (_SPECIAL if special else b"") + added[number].encode()
        elif byte_level:
            found[number] = b"".join(byte_of.get(letter) or letter.encode() for letter in name)
        elif len(name) == 6 and name.startswith("<0x"):
            found[number] = bytes([int(name[3:5], 16)])
        else:
            found[number] = name.replace("\u2581", " ").encode()
    return found


def token_ids(folder: Path) -> dict[str, int]:
    """Ids of the tokens that begin, end and pad a text, by their keys of config.json; those that a tokenizer names."""
    about = json.loads((folder / ABOUT).read_text()) if (folder / ABOUT).is_file() else {}
    known = read_tokenizer(folder / TOKENIZER)[0]
    found = {}
    for which in ("bos", "eos", "pad"):
        name = about.get(f"{which}_token")
        number = known.token_to_id(name["content"] if isinstance(name, dict) else name) if name else None
        if number is not None:
            found[f"{which}_token_id"] = number
    return found


class Retokenized:
    """A checkpoint of either kind, in which some tables have the rows of another vocabulary.

    Attributes:
        reader: the checkpoint as it is.
        tensors: name -> shape and type.
        path: its folder.
    """

    def __init__(self, reader: SafetensorsReader | TorchDistReader, tables: Sequence[str], rows: Vocabulary) -> None:
        self.reader, self.path, self._rows = reader, reader.path, rows
        self._tables = [name for name in tables if name in reader.tensors]
        self.tensors = dict(reader.tensors)
        for name in self._tables:
            stored = reader.tensors[name]
            self.tensors[name] = Stored((rows.size, *stored.shape[1:]), stored.dtype)

    def read(self, name: str) -> "Tensor":
        """One whole tensor."""
        tensor = self.reader.read(name)
        return self._rows.table(tensor) if name in self._tables else tensor

    def read_piece(self, piece: "Piece") -> "Tensor":
        """A part of a tensor; tables are always whole."""
        return self.read(piece.key) if piece.key in self._tables else self.reader.read_piece(piece)

    def files(self) -> Sequence[Path]:
        """The files that hold tensors."""
        return self.reader.files()
