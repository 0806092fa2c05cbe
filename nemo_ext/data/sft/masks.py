"""Token ids and loss mask of a conversation.

The text is encoded once, by the model's tokenizer with two changes. First, control tokens get secret names, and the
template's control tokens are translated to them, so that `<|im_end|>` in the data remains ordinary text. Second, two
added tokens mark where trained text begins and ends, so that no token crosses a boundary, and the prompt before an
answer has the same ids as at generation. These two are removed from the ids afterwards.
"""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from nemo_ext.chat.sample import Sample
from nemo_ext.chat.template import ControlTokens, Rendered, Template
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, ids_of, load_tokenizer
from nemo_ext.job.settings import nearest

# Text in a template that looks like a control token, which the tokenizer must then have.
_LOOKS_LIKE_CONTROL = re.compile(r"<\|[^<>|\s]+\|>")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and loss mask of one text to train on.

    Attributes:
        ids: [length] token ids, int32.
        mask: [length] uint8, 1 where the token is a training target. Labels are shifted by one, so position i has a
            loss where `mask[i + 1]` is 1.
        thinking: whether the text has thinking on, which may differ from its sample's mode if turns are split.
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    thinking: bool = False


class ChatEncoder:
    """Encoder of conversations, for one template and one tokenizer.

    Args:
        tokenizer: Hugging Face tokenizer, whose control tokens are its special tokens and any added token that the
            template writes; or byte tokenizer, which has none, so that data and markup cannot be distinguished.
        allow_missing: True to encode as ordinary text the control tokens that the tokenizer does not have.

    Raises:
        ValueError: The template writes a token like `<|im_end|>` that the tokenizer does not have.
    """

    def __init__(self, template: Template, tokenizer: Tokenizer, *, allow_missing: bool = False) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.control: ControlTokens | None = None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._prepare(tokenizer, allow_missing=allow_missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.template, self.tokenizer.describe())

    def encode(self, sample: Sample, *, turns: Literal["split", "last", "whole"] = "split") -> list[Encoded]:
        """Encode the sample's training texts; see `Template.renderings`.

        Raises:
            ValueError: The template rejects the sample.
        """
        texts = self.template.renderings(sample, turns=turns, control=self.control)
        return [self.tokens(text) for text in texts]

    def tokens(self, rendered: Rendered) -> Encoded:
        """Return token ids and loss mask of a text that was rendered with this encoder's `control`."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return _bytes(rendered)
        if not self._cuts:
            return self._by_offsets(rendered)
        parts = []
        position = 0
        for start, end in rendered.trained:
            parts += [
                self._secret(rendered, position, start),
                self._open,
                self._secret(rendered, start, end),
                self._close,
            ]
            position = end
        parts.append(self._secret(rendered, position, len(rendered.text)))
        ids = self._ids_of("".join(parts)).astype(np.int32)
        opens, closes = ids == self._open_id, ids == self._close_id
        inside = opens.cumsum(dtype=np.uint8) - closes.cumsum(dtype=np.uint8)  # modulo 256
        kept = ~(opens | closes)
        return Encoded(ids[kept], inside[kept], rendered.thinking)

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends turns with a control token; True for the byte tokenizer, which has none."""
        return self.control is None or self._names.match(self.template.closing.lstrip()) is not None

    def truncated(self, text: str, budgets: Sequence[int]) -> dict[int, str]:
        """Return the text, cut at a whole character, for each budget of tokens that it exceeds, keyed by budget."""
        starts, ends = self._ends(text)
        cuts = {}
        for budget in budgets:
            if budget < len(ends):
                last = budget
                # Byte-level tokens of one character all have the character's offsets.
                while last and starts[last] < ends[last - 1]:
                    last -= 1
                cuts[budget] = text[: ends[last - 1]] if last else ""
        return cuts

    def _ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the start and the end of each token in the text, as two lists of character offsets."""
        if isinstance(self.tokenizer, ByteTokenizer):
            sizes = [len(character.encode()) for character in text]
            starts = [number for number, size in enumerate(sizes) for _ in range(size)]
            return starts, [number + 1 for number in starts]
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return [start for start, _ in offsets], [end for _, end in offsets]

    def _prepare(self, tokenizer: HuggingFaceTokenizer, *, allow_missing: bool) -> None:
        described = json.loads(tokenizer.path.read_bytes())
        added = described.get("added_tokens", [])
        literals = self.template.literals
        control = [
            token for token in added if token["special"] or (token["content"].strip() and token["content"] in literals)
        ]
        names = [token["content"] for token in control]
        missing = sorted({name for name in _LOOKS_LIKE_CONTROL.findall(literals) if name not in names})
        if missing and not allow_missing:
            raise ValueError(
                f"tokenizer {tokenizer.path} has no token {missing[0]!r}, which the chat template {self.template.name} "
                f"writes: set template to this tokenizer's own, or add the token to it; {nearest(missing[0], names)}"
            )
        nonce = secrets.token_hex(8)
        self._secrets = {name: f"<|{nonce}:{number}|>" for number, name in enumerate(names)}
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._tokenizer = _renamed(described, self._secrets, tokenizer)
        self._open, self._close = f"<|{nonce}:open|>", f"<|{nonce}:close|>"
        self._tokenizer.add_special_tokens(
            [AddedToken(name, normalized=False, special=True) for name in (self._open, self._close)]
        )
        self._open_id, self._close_id = (self._id(name) for name in (self._open, self._close))
        self._ids_of = ids_of(self._tokenizer)
        self._cuts = not any(token["lstrip"] or token["rstrip"] for token in control) and self._cut_is_clean()
        self.control = ControlTokens(names)

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        assert number is not None
        return number

    def _cut_is_clean(self) -> bool:
        """Return whether text after a boundary token gets the usual ids; some tokenizers add a space there."""
        ids = self._tokenizer.encode(f"a{self._open}a", add_special_tokens=False).ids
        return ids[ids.index(self._open_id) + 1 :] == [self._tokenizer.token_to_id("a")]

    def _secret(self, rendered: Rendered, start: int, end: int) -> str:
        """Return the text from `start` to `end` with the secret names of control tokens; quoted data are unchanged."""
        parts = []
        for quote_start, quote_end in rendered.quoted:
            if start <= quote_start and quote_end <= end:
                parts += [self._translated(rendered.text[start:quote_start]), rendered.text[quote_start:quote_end]]
                start = quote_end
        parts.append(self._translated(rendered.text[start:end]))
        return "".join(parts)

    def _translated(self, text: str) -> str:
        return self._names.sub(lambda match: self._secrets[match[0]], text)

    def _by_offsets(self, rendered: Rendered) -> Encoded:
        """Encode without boundary tokens: a token is trained on if all of its characters are."""
        parts = [self._secret(rendered, start, end) for start, end in _between(rendered)]
        encoding = self._tokenizer.encode("".join(parts), add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Every second part is trained on; a token belongs to the part in which it starts.
        bounds = np.cumsum([len(part) for part in parts])
        part = np.searchsorted(bounds, starts, side="right")
        part = np.minimum(part, len(parts) - 1)
        inside = (part % 2 == 1) & (ends <= bounds[part])
        return Encoded(ids, inside.astype(np.uint8), rendered.thinking)


def _rebuild(template: Template, tokenizer: dict[str, object]) -> ChatEncoder:
    return ChatEncoder(template, load_tokenizer(tokenizer), allow_missing=True)


def _between(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) spans of the text in order, alternately untrained and trained; they may be empty."""
    position = 0
    for start, end in rendered.trained:
        yield position, start
        yield start, end
        position = end
    yield position, len(rendered.text)


def _bytes(rendered: Rendered) -> Encoded:
    parts = [rendered.text[start:end].encode() for start, end in _between(rendered)]
    ids = np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int32)
    trained = np.arange(len(parts)) % 2 == 1
    mask = np.repeat(trained, [len(part) for part in parts]).astype(np.uint8)
    return Encoded(ids, mask, rendered.thinking)


def _renamed(described: dict[str, Any], names: dict[str, str], tokenizer: HuggingFaceTokenizer) -> RustTokenizer:
    """Return a copy of a tokenizer in which some tokens have new names but the same ids.

    Changes `described`, the contents of its tokenizer.json. The keys of `names` are old names.
    """
    before = RustTokenizer.from_str(json.dumps(described)).get_vocab(with_added_tokens=True)
    model = described["model"]
    for token in described.get("added_tokens", []):
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # A post-processor would add tokens that the chat text already has, or trim spaces from the offsets.
    described |= {"post_processor": None, "truncation": None, "padding": None}
    renamed = RustTokenizer.from_str(json.dumps(described))
    after = renamed.get_vocab(with_added_tokens=True)
    if after != {names.get(token, token): number for token, number in before.items()}:
        raise ValueError(
            f"the control tokens of tokenizer {tokenizer.path} cannot be renamed, which is required to distinguish "
            "them from the same words in the data: use another tokenizer"
        )
    return renamed
