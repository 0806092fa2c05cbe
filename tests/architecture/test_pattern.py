"""The notation: reading, writing, pointing at mistakes, compiling to Megatron's pattern."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.blocks import FLAGS, NONE_ALLOWED, VALUES, Block
from nemo_ext.architecture.pattern import CompiledPattern, Pattern, PatternError, compile, format, parse


@st.composite
def any_blocks(draw: st.DrawFn) -> Block:
    kind = draw(st.sampled_from(sorted(VALUES)))
    sizes = [name for name in VALUES[kind] if name not in FLAGS]
    if VALUES[kind] and draw(st.integers(0, 5)) == 0:
        return Block.from_values(kind, linear=True)
    names = draw(st.lists(st.sampled_from(sizes), unique=True, max_size=2)) if sizes else []
    return Block.from_values(kind, **{name: draw(st.integers((kind, name) not in NONE_ALLOWED, 20)) for name in names})


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    # Repeated short sequences of few blocks, in which compression could make mistakes.
    palette = draw(st.lists(any_blocks(), min_size=1, max_size=3))
    motif = st.lists(st.sampled_from(palette), min_size=1, max_size=4)
    parts = draw(st.lists(st.tuples(motif, st.integers(1, 6)), min_size=1, max_size=4))
    blocks = tuple(block for blocks, count in parts for block in blocks * count)
    cuts = draw(st.lists(st.integers(0, len(blocks)), max_size=4))
    return Pattern(blocks, tuple(cuts))


@given(patterns())
def test_written_patterns_are_read_back(pattern: Pattern) -> None:
    assert parse(format(pattern)) == pattern
    assert parse(format(pattern, compress=False)) == pattern


@given(patterns())
def test_writing_is_stable_and_never_longer_than_the_plain_form(pattern: Pattern) -> None:
    text = format(pattern)
    assert format(parse(text)) == text
    assert len(text) <= len(format(pattern, compress=False))


@given(patterns(), st.data())
def test_white_space_between_tokens_is_ignored(pattern: Pattern, data: st.DataObject) -> None:
    text = format(pattern)
    marks = "|(){},="
    places = [0] + [
        i
        for i in range(1, len(text) + 1)
        if text[i - 1] in marks or text[i : i + 1] in marks or (text[i - 1] == "x" and text[i].isdigit())
    ]
    at = data.draw(st.sampled_from(places))
    assert parse(f"{text[:at]} \n{text[at:]}") == pattern


@given(st.text(alphabet="M*E-GD+|(){}=,x0123456789 hkvefnsltop/", max_size=30))
def test_any_text_is_read_or_refused_at_a_place_in_it(text: str) -> None:
    try:
        place, read = 0, len(parse(text).blocks)
    except PatternError as error:
        place, read = error.position, 1
    assert 0 <= place <= len(text)
    assert read > 0


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("(*-)x3", "*-*-*-"),
        ("-x3", "---"),
        ("M{heads=32}x2", "M{heads=32}M{heads=32}"),
        ("((M*)x2E)x2", "M*M*EM*M*E"),
        ("(M|)x2M", "M|M|M"),
        (" M \n E ", "ME"),
        ("*{ kv = 4 , heads = 8 }", "*{heads=8,kv=4}"),
        ("G D +", "GD+"),
    ],
)
def test_repeats_and_values_mean_their_plain_form(text: str, plain: str) -> None:
    assert format(parse(text), compress=False) == plain


@pytest.mark.parametrize(
    ("plain", "compressed"),
    [
        ("MEME", "MEME"),
        ("MM", "MM"),
        ("---", "-x3"),
        ("MEMEMEME", "MEMEMEME"),
        ("MEMEMEMEME", "(ME)x5"),
        ("*-" * 40, "(*-)x40"),
        (("*-" * 3 + "M") * 8, "(*-*-*-M)x8"),
        ("*{window=4096}-" * 3 + "*-", "(*{window=4096}-)x3*-"),
        ("*{kv=4}*{kv=4}", "*{kv=4}x2"),
        ("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "(MEMEM*E)x5MEMEMEM*EMEMEMEME"),
        (("*-" * 10 + "|") * 3 + "*-" * 10, "((*-)x10|)x3(*-)x10"),
    ],
)
def test_compression_is_used_only_if_shorter(plain: str, compressed: str) -> None:
    assert format(parse(plain)) == compressed


def test_cuts_are_before_blocks_and_stages_may_be_empty() -> None:
    pattern = parse("|M||*E|")
    assert pattern.cuts == (0, 1, 1, 3)
    assert pattern.stages == ((0, 0), (0, 1), (1, 1), (1, 3), (3, 3))
    assert compile(pattern).hybrid_layer_pattern == "|M||*E|"
    with pytest.raises(ValueError, match="do not lie between 0 and the 1 blocks"):
        Pattern((Block("M"),), (2,))


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 0, "expected at least one block"),
        ("||", 2, "expected at least one block"),
        ("ME*m", 3, "unknown symbol 'm': expected a block (one of M * E - G D +), '|' or '('; did you mean 'M'?"),
        ("/M", 0, "expected at least one block"),
        ("M/", 2, "expected the blocks of a prediction depth after '/'"),
        ("M/*E/*-", 5, "prediction depth 2 differs from the first"),
        ("M/*|E", 3, "a prediction depth has no pipeline cuts"),
        ("(M/E)x2", 2, "a prediction depth ('/') cannot begin inside a group"),
        ("(*-", 0, "expected ')' to close this group"),
        ("*-)", 2, "there is no open group"),
        ("M()", 2, "expected a block inside the group"),
        ("x3", 0, "a repeat must follow a block or a group"),
        ("Mx", 2, "expected a repeat count after 'x'"),
        ("Mx 0", 3, "a repeat count must be at least 1; omit the block for a no-op"),
        ("*{kv=99999999999999999999999}", 5, "'kv' is more than 2147483647: write a smaller number"),
        ("(M*)x9999", 5, "this repeat makes more than 2048 blocks"),
        ("Mx2000/Ex30/Ex30", 0, "the pattern has 2060 blocks, more than 2048"),
        ("M|x2", 2, "a pipeline cut cannot be repeated"),
        ("M{}", 2, "expected the name of a value of 'M': one of heads, head_dim, state, groups, linear"),
        ("-{ffn=8,}", 8, "expected the name of a value of '-'"),
        (
            "(*-{fnn=3})x2",
            4,
            "unknown value 'fnn' for '-' (MLP): expected one of ffn, bias, linear; did you mean 'ffn'?",
        ),
        ("E{latent=0}", 9, "expected a positive integer for 'latent', or none (E{latent=none})"),
        ("E{moe_latent_size=8}", 2, "did you mean 'latent'?"),
        ("E{top_k=2}", 2, "did you mean 'topk'?"),
        ("*{num_query_groups=2}", 2, "did you mean 'kv'?"),
        ("*{kv=4,kv=4}", 7, "value 'kv' is given twice"),
        ("*{kv}", 4, "expected '=' and a number after 'kv'"),
        ("*{kv=none}", 5, "expected a positive integer for 'kv'"),
        ("*{window=0}", 9, "expected a positive integer for 'window', or none (*{window=none})"),
        ("*{kv=4 heads=8}", 7, "expected ',' or '}' after a value"),
        ("M*{kv=4", 2, "expected '}' to close these values"),
        ("*{linear=1}", 8, "'linear' is a flag: write *{linear} without a value"),
        ("*{linear,kv=4}", 9, "a linear-replaced block cannot have other values: write *{linear}"),
        ("MG{heads=4}", 2, "a gated delta net block ('G') takes no values"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, position: int, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert caught.value.position == position
    problem, shown, caret = str(caught.value).split("\n")
    assert message in problem
    assert problem.endswith(f"(character {position + 1})")
    assert shown == f"  {text}"
    assert caret == " " * (2 + position) + "^"


def test_the_caret_stays_under_its_character_in_long_and_folded_text() -> None:
    text = "M" * 150 + "\n" + "?" + "M" * 150
    with pytest.raises(PatternError) as caught:
        parse(text)
    _, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^")] == "?"
    assert shown.startswith("  ...")
    assert shown.endswith("...")
    assert len(shown) < 120


def test_compile_gives_plain_symbols_and_overrides_by_layer_number() -> None:
    pattern = parse("M{heads=32}|*{kv=4,window=4096}-{ffn=96}-|E{experts=64,topk=4,shared=none,latent=32}*{linear}")
    assert compile(pattern) == CompiledPattern(
        "M|*--|E*",
        {
            1: {"mamba_num_heads": 32},
            2: {"num_query_groups": 4, "window_size": (4095, 0), "window_attn_skip_freq": None},
            3: {"ffn_hidden_size": 96},
            5: {
                "num_moe_experts": 64,
                "moe_router_topk": 4,
                "moe_shared_expert_intermediate_size": None,
                "moe_latent_size": 32,
            },
            6: {"linear": True},
        },
    )


def test_prediction_depths_are_numbered_from_one() -> None:
    pattern = parse("(ME)x2 | *- / *E{ffn=8} / *E{ffn=8}")

    assert (pattern.depths, pattern.mtp) == (2, (Block("*"), Block("E", (("ffn", 8),))))
    assert str(pattern) == "MEME|*-/*E{ffn=8}/*E{ffn=8}"
    assert parse(str(pattern)) == pattern
    compiled = compile(pattern)
    assert compiled.hybrid_layer_pattern == "MEME|*-/*E/*E"
    assert (compiled.overrides, compiled.mtp_overrides) == ({}, {2: {"moe_ffn_hidden_size": 8}})


def test_compile_of_full_attention_in_a_windowed_model() -> None:
    assert compile(parse("*{window=none}")).overrides == {1: {"window_size": None}}


@pytest.mark.parametrize("text", ["*+", "M*D"])
def test_compile_refuses_what_megatron_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="cannot mix attention"):
        compile(parse(text))


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("(" * 2000 + "M" + ")" * 2000, 32, "more than 32 nested groups: remove brackets"),
        ("-{ffn=" + "9" * 5000 + "}", 6, "'ffn' is more than 2147483647"),
        ("Mx" + "9" * 5000, 2, "this repeat makes more than 2048 blocks"),
    ],
    ids=["brackets", "value", "repeat"],
)
def test_numbers_that_python_cannot_read_are_mistakes_too(text: str, position: int, message: str) -> None:
    with pytest.raises(PatternError, match="character") as raised:
        parse(text)
    assert (raised.value.position, raised.value.problem[: len(message)]) == (position, message)


def test_a_block_has_the_notation_s_largest_size() -> None:
    assert parse("-{ffn=2147483647}").blocks == (Block.from_values("-", ffn=2147483647),)
    with pytest.raises(ValueError, match="'ffn' of '-' must be at most 2147483647, got 2147483648"):
        Block.from_values("-", ffn=2147483648)


def test_a_pattern_may_have_the_maximum_number_of_blocks() -> None:
    assert len(parse("Mx2048").blocks) == len(parse("(M*)x1024").blocks) == 2048
