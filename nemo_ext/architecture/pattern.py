"""Notation for a whole model in one line: parser, formatter, and compiler to Megatron's `hybrid_layer_pattern`.

    pattern := item+ ('/' depth)*     item  := '|' | block [repeat] | '(' item+ ')' [repeat]
    depth   := item+                  block := SYMBOL [ '{' value (',' value)* '}' ]
    value   := NAME '=' (INTEGER | 'none') | FLAG
    repeat  := 'x' INTEGER

Symbols are Megatron's: `M` Mamba-2, `*` attention, `E` MoE, `-` MLP, `|` pipeline cut; `G`, `D` and `+` are passed
through. This package adds repeats, as in `(*-)x40`, and per-block values, as in `*{kv=4}`, `-{ffn=5376}`, `*{linear}`
or `*{window=4096}`. A query in a windowed block attends to itself and the window - 1 tokens before it (Hugging Face's
`sliding_window`), and `*{window=none}` is full attention in a windowed model. Whitespace is ignored. A no-op is written
by omitting the symbol.

Each `/` begins a depth of multi-token prediction (MTP), as in `ME*-/*E/*E`: the blocks that predict one token further.
All depths have the same blocks, and no pipeline cuts, as they belong to the last stage.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from string import ascii_letters, digits

from nemo_ext.architecture.blocks import FLAGS, LINEAR, MAX_VALUE, NAMES, NONE_ALLOWED, VALUES, Block, unknown_value

CUT = "|"
DEPTH = "/"
MAX_BLOCKS = 2048
"""Maximum number of blocks, so that a mistyped repeat count raises an error instead of exhausting memory."""
MAX_DEPTH = 32
"""Maximum depth of nested groups; deeper nesting is a mistake and would exceed Python's recursion limit."""
_SHOWN = 100


class PatternError(ValueError):
    """Error in a pattern; the message shows the pattern with a caret under the offending character.

    Attributes:
        problem: Description of the error and of what was expected.
        pattern: The pattern as a string.
        position: 0-based index of the offending character (`len(pattern)` if the end was unexpected).
    """

    def __init__(self, problem: str, pattern: str, position: int) -> None:
        self.problem, self.pattern, self.position = problem, pattern, position
        # A folded YAML string may contain line breaks; replacing each by one space keeps the caret aligned.
        line = "".join(" " if character.isspace() else character for character in pattern)
        start = 0
        if len(line) > _SHOWN:
            start = max(0, min(position - _SHOWN // 2, len(line) - _SHOWN))
        shown = line[start : start + _SHOWN]
        before = "..." if start else ""
        after = "..." if start + _SHOWN < len(line) else ""
        caret = " " * (len(before) + position - start) + "^"
        super().__init__(f"{problem} (character {position + 1})\n  {before}{shown}{after}\n  {caret}")


@dataclass(frozen=True)
class Pattern:
    """Sequence of blocks and the positions of pipeline cuts.

    Attributes:
        blocks: The residual blocks in order.
        cuts: Sorted 0-based indices of the blocks right after each `|`. An index may repeat (an empty stage, which
            Megatron allows) and may be 0 or `len(blocks)`.
        mtp: The blocks of each depth of multi-token prediction, which are the same in all depths.
        depths: Number of depths.
    """

    blocks: tuple[Block, ...]
    cuts: tuple[int, ...] = ()
    mtp: tuple[Block, ...] = ()
    depths: int = 0

    def __post_init__(self) -> None:
        if bool(self.mtp) != (self.depths > 0):
            raise ValueError(
                f"mtp has {len(self.mtp)} blocks, but depths={self.depths}: set both for multi-token prediction, or "
                "neither"
            )
        object.__setattr__(self, "cuts", tuple(sorted(self.cuts)))
        if self.cuts and not 0 <= self.cuts[0] <= self.cuts[-1] <= len(self.blocks):
            raise ValueError(
                f"pattern cuts {self.cuts} do not lie between 0 and the {len(self.blocks)} blocks of the pattern: "
                "correct the cuts"
            )

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Each stage's half-open range (first, last) of 0-based block numbers."""
        edges = (0, *self.cuts, len(self.blocks))
        return tuple(pairwise(edges))

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True)
class CompiledPattern:
    """A pattern in Megatron's form.

    Attributes:
        hybrid_layer_pattern: Plain symbols, `|` and `/`.
        overrides: Mapping from the 1-based global layer numbers of blocks with values to `TransformerConfig` fields;
            a linear-replaced block has `{"linear": True}`.
        mtp_overrides: The same for the blocks of a depth, which Megatron numbers from 1.
    """

    hybrid_layer_pattern: str
    overrides: dict[int, dict[str, object]] = field(default_factory=dict)
    mtp_overrides: dict[int, dict[str, object]] = field(default_factory=dict)


def parse(text: str) -> Pattern:
    """Parse a pattern.

    Raises:
        PatternError: The string is not a pattern; the message gives the position and the expected symbols.
    """
    reader = _Reader(text)
    blocks: list[Block] = []
    cuts: list[int] = []
    for item in reader.pattern():
        if isinstance(item, Block):
            blocks.append(item)
        else:
            cuts.append(len(blocks))
    depths = reader.depths()
    if (count := len(blocks) + sum(map(len, depths))) > MAX_BLOCKS:
        raise PatternError(f"the pattern has {count} blocks, more than {MAX_BLOCKS}: remove some", text, 0)
    return Pattern(tuple(blocks), tuple(cuts), depths[0] if depths else (), len(depths))


class _Reader:
    """Recursive descent parser for one string; a cut is represented by the string `|`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def pattern(self) -> list[Block | str]:
        items = self.items(opened=None)
        if not any(isinstance(item, Block) for item in items):
            raise self.error(f"expected at least one block, one of {' '.join(NAMES)}")
        return items

    def depths(self) -> list[tuple[Block, ...]]:
        """Read the depths of multi-token prediction, each of which begins with `/`."""
        depths: list[tuple[Block, ...]] = []
        while self.peek() == DEPTH:
            self.at += 1
            start = self.next_position()
            items = self.items(opened=None, cuts=False)
            if not items:
                raise self.error(f"expected the blocks of a prediction depth after '/', such as {DEPTH}*E")
            depths.append(tuple(item for item in items if isinstance(item, Block)))
            if depths[-1] != depths[0]:
                raise self.error(f"prediction depth {len(depths)} differs from the first: write the same blocks", start)
        return depths

    def items(self, *, opened: int | None, cuts: bool = True) -> list[Block | str]:
        items: list[Block | str] = []
        while (character := self.peek()) and not (character == ")" and opened is not None):
            start = self.at
            if character == DEPTH and opened is None:
                break
            if character == CUT and not cuts:
                raise self.error("a prediction depth has no pipeline cuts, as it belongs to the last stage: remove '|'")
            if character == CUT:
                self.at += 1
                items.append(CUT)
                if self.peek() == "x":
                    raise self.error("a pipeline cut cannot be repeated: expected a block, '(' or '|'")
            elif character == "(":
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    raise self.error(f"more than {MAX_DEPTH} nested groups: remove brackets")
                self.at += 1
                inner = self.items(opened=start, cuts=cuts)
                self.depth -= 1
                if self.peek() != ")":
                    raise self.error("expected ')' to close this group", start)
                if not inner:
                    raise self.error("expected a block inside the group")
                self.at += 1
                items += self.repeated(inner, start)
            elif character in NAMES:
                self.at += 1
                items += self.repeated([Block(character, self.values(character))], start)
            else:
                raise self.error(_unexpected(character))
        return items

    def repeated(self, items: list[Block | str], start: int) -> list[Block | str]:
        if self.peek() != "x":
            return items
        self.at += 1
        position = self.next_position()
        number = self.word(digits)
        if not number:
            raise self.error("expected a repeat count after 'x'")
        # Python refuses to parse a number with thousands of digits.
        count = int(number) if len(number.lstrip("0")) <= len(str(MAX_BLOCKS)) else MAX_BLOCKS + 1
        if count == 0:
            raise self.error("a repeat count must be at least 1; omit the block for a no-op", position)
        if count * len(items) > MAX_BLOCKS:
            raise self.error(f"this repeat makes more than {MAX_BLOCKS} blocks: lower the count", position)
        return items * count

    def values(self, kind: str) -> tuple[tuple[str, int | bool], ...]:
        if self.peek() != "{":
            return ()
        opened = self.at
        if not VALUES[kind]:
            raise self.error(f"a {NAMES[kind]} block ({kind!r}) takes no values: remove the braces")
        values: dict[str, int | bool] = {}
        separator = "{"
        while separator != "}":
            self.at += 1
            position = self.next_position()
            name = self.word(ascii_letters + digits + "_")
            if not name:
                raise self.error(f"expected the name of a value of {kind!r}: one of {', '.join(VALUES[kind])}")
            if name not in VALUES[kind]:
                raise self.error(unknown_value(kind, name), position)
            if name in values:
                raise self.error(f"value {name!r} is given twice: remove one", position)
            values[name] = self.value(kind, name)
            if LINEAR in values and len(values) > 1:
                raise self.error(f"a linear-replaced block cannot have other values: write {kind}{{linear}}", position)
            separator = self.peek()
            if not separator:
                raise self.error("expected '}' to close these values", opened)
            if separator not in "},":
                raise self.error("expected ',' or '}' after a value")
        self.at += 1
        return tuple(values.items())

    def value(self, kind: str, name: str) -> int | bool:
        if name in FLAGS:
            if self.peek() == "=":
                raise self.error(f"{name!r} is a flag: write {kind}{{{name}}} without a value")
            return True
        if self.peek() != "=":
            raise self.error(f"expected '=' and a number after {name!r}")
        self.at += 1
        position = self.next_position()
        word = self.word(ascii_letters + digits + "_")
        none = (kind, name) in NONE_ALLOWED
        if none and word == "none":
            return 0
        if not word or not set(word) <= set(digits) or not word.strip("0"):
            hint = f", or none ({kind}{{{name}=none}})" if none else ""
            raise self.error(f"expected a positive integer for {name!r}{hint}", position)
        if len(word.lstrip("0")) > len(str(MAX_VALUE)) or int(word) > MAX_VALUE:
            raise self.error(f"{name!r} is more than {MAX_VALUE}: write a smaller number", position)
        return int(word)

    def peek(self) -> str:
        """Skip whitespace and return the next character, or "" at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def next_position(self) -> int:
        self.peek()
        return self.at

    def word(self, alphabet: str) -> str:
        self.peek()
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in alphabet:
            self.at += 1
        return self.text[start : self.at]

    def error(self, problem: str, position: int | None = None) -> PatternError:
        return PatternError(problem, self.text, self.at if position is None else position)


def _unexpected(character: str) -> str:
    expected = f"expected a block (one of {' '.join(NAMES)}), '|' or '('"
    if character == DEPTH:
        return f"a prediction depth ('/') cannot begin inside a group: {expected}"
    if character == ")":
        return f"there is no open group to close: {expected}"
    if character == "x":
        return f"a repeat must follow a block or a group: {expected}"
    if character == "{":
        return f"values must follow directly after a block's symbol: {expected}"
    guess = next(iter(get_close_matches(character.upper(), NAMES, n=1)), None)
    return f"unknown symbol {character!r}: {expected}" + (f"; did you mean {guess!r}?" if guess else "")


def format(pattern: Pattern, *, compress: bool = True) -> str:
    """Write a pattern in canonical form: `parse(format(p)) == p`, and equal patterns give equal strings.

    Args:
        pattern: The blocks and cuts.
        compress: Whether to write runs as `-x3` and repeated sequences as `(*-)x40` where that is clearly shorter.
    """
    tokens: list[str] = []
    cuts = list(pattern.cuts)
    for index, block in enumerate((*pattern.blocks, None)):
        while cuts and cuts[0] == index:
            cuts.pop(0)
            tokens.append(CUT)
        if block is not None:
            tokens.append(str(block))
    main, depth = (
        _shortest(tuple(words), {})[1] if compress else "".join(words) for words in (tokens, map(str, pattern.mtp))
    )
    return main + f"{DEPTH}{depth}" * pattern.depths


# Costs in half-characters, so that ties can be broken: a run is preferred over symbols of equal length (`-x3`), and
# a group must save more than two characters over its symbols to be worth its brackets (`MEMEMEME`, but `(ME)x5`).
_LITERAL, _RUN_BONUS, _GROUP_PENALTY = 2, 1, 5


def _shortest(tokens: tuple[str, ...], known: dict[tuple[str, ...], tuple[int, str]]) -> tuple[int, str]:
    """Find the cheapest way to write a sequence of tokens, by dynamic programming from the right.

    Args:
        tokens: blocks in pattern notation, and cuts.
        known: cache of results, keyed by tokens; extended by this function.

    Returns:
        The cost, which grows with the length of the string, and the string.
    """
    if tokens in known:
        return known[tokens]
    length = len(tokens)
    # same[p][i]: number of consecutive tokens from i that equal the token p positions later.
    same: list[list[int]] = [[]]
    for period in range(1, length // 2 + 1):
        row = [0] * (length - period + 1)
        for i in range(length - period - 1, -1, -1):
            if tokens[i] == tokens[i + period]:
                row[i] = row[i + 1] + 1
        same.append(row)

    best: list[tuple[int, str]] = [(0, "")] * (length + 1)
    for i in range(length - 1, -1, -1):
        rest = best[i + 1]
        cheapest = (_LITERAL * len(tokens[i]) + rest[0], tokens[i] + rest[1])
        for period in range(1, (length - i) // 2 + 1):
            copies = 1 + same[period][i] // period
            # Periods that are themselves repetitions are skipped: (MEME)x2 is never better than (ME)x4.
            if copies < 2 or any(period % d == 0 and same[d][i] >= period - d for d in range(1, period // 2 + 1)):
                continue
            if period == 1:
                if tokens[i] == CUT:
                    continue
                inner_cost, inner = _LITERAL * len(tokens[i]) - _RUN_BONUS, tokens[i]
            else:
                inner_cost, inner = _shortest(tokens[i : i + period], known)
                inner_cost, inner = inner_cost + 2 * _LITERAL + _GROUP_PENALTY, f"({inner})"
            # Ties go to the longest repeat that starts furthest left: (*-)x5* rather than *(-*)x5.
            for count in range(max(2, copies - 1), copies + 1):
                rest = best[i + period * count]
                repeat = f"x{count}"
                cost = inner_cost + _LITERAL * len(repeat) + rest[0]
                if cost <= cheapest[0]:
                    cheapest = (cost, inner + repeat + rest[1])
        best[i] = cheapest
    known[tokens] = best[0]
    return best[0]


def compile(pattern: Pattern) -> CompiledPattern:
    """Compile a pattern to Megatron's plain symbols and the `TransformerConfig` fields of blocks with values.

    Raises:
        ValueError: Attention (`*`) is mixed with MLA (`+`) or DeepSeek sparse attention (`D`), which
            Megatron rejects.
    """
    kinds = {block.kind for block in (*pattern.blocks, *pattern.mtp)}
    if "*" in kinds and kinds & {"D", "+"}:
        raise ValueError(
            f"model.pattern={format(pattern)}: Megatron cannot mix attention ('*') with MLA ('+') or DeepSeek sparse "
            "attention ('D') in one model, so replace the blocks of one kind"
        )
    stages = ["".join(block.kind for block in pattern.blocks[first:last]) for first, last in pattern.stages]
    depth = "".join(block.kind for block in pattern.mtp)
    overrides, mtp_overrides = (
        {number: _fields(block) for number, block in enumerate(blocks, start=1) if block.values}
        for blocks in (pattern.blocks, pattern.mtp)
    )
    return CompiledPattern(CUT.join(stages) + f"{DEPTH}{depth}" * pattern.depths, overrides, mtp_overrides)


def _fields(block: Block) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in block.values:
        field_name = VALUES[block.kind][name]
        if name == "window":
            fields[field_name] = (value - 1, 0) if value else None
            if value:
                # Megatron's rule of full attention in every Nth layer must not override the block's window.
                fields["window_attn_skip_freq"] = None
        else:
            # 0 means "none" (a block without shared expert); a size is never 0 otherwise.
            fields[field_name] = value or None
    return fields
