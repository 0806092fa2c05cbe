"""Databases, tools and conversations, on a world of one table."""

import pickle
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.rl.environments import Conversation
from nemo_ext.rl.worlds.world import Database, Text, ToolError, World, check, world_environment

TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "books": {"book-1": {"title": "Dune", "shelf": 2}, "book-2": {"title": "Emma", "shelf": 1}}
}


def find(database: Database, title: Text) -> Any:
    """Books of a title."""
    return [key for key, row in database.rows("books") if row["title"] == title]


def move(
    database: Database,
    book: Text,
    shelf: Annotated[int, Field(ge=1, le=9, description="where to")],
    side: Literal["left", "right"] | None = None,
) -> str:
    """Put a book
    on another shelf."""
    database.update("books", book, shelf=shelf, **({} if side is None else {"side": side}))
    return "moved"


def buy(database: Database, title: Text) -> Any:
    """Add a book."""
    if title == "Dune":
        raise ToolError("we have it")
    return {"id": database.insert("books", {"title": title, "shelf": 1}, "book-")}


def burn(database: Database, book: Text) -> str:
    """Delete a book."""
    database.delete("books", book)
    return "gone"


def crash(database: Database) -> str:
    """A mistake."""
    raise RuntimeError("broken")


LIBRARY = World(name="library", build=lambda seed: TABLES, tools=(find, move, buy, burn, crash), prompt="")
ENVIRONMENT = world_environment(LIBRARY, max_turns=4, style="any")
MOVE = {"name": "move", "arguments": {"book": "book-1", "shelf": 5}}


def begin(**more: Any) -> Conversation:
    assert ENVIRONMENT.begin is not None
    return ENVIRONMENT.begin(ENVIRONMENT.check({"seed": 0, "calls": [MOVE], **more}))


def calls(*made: tuple[str, dict[str, Any]], text: str = "") -> Response:
    parsed = tuple(ToolCall(name=name, arguments=arguments, id=str(n)) for n, (name, arguments) in enumerate(made))
    return Response(text=text, answer=text, tool_calls=parsed)


def test_a_schema_is_made_from_the_signature() -> None:
    function = LIBRARY.by_name["move"].schema["function"]

    assert function["description"] == "Put a book on another shelf."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "book": {"type": "string", "minLength": 1, "maxLength": 10_000},
            "shelf": {"type": "integer", "minimum": 1, "maximum": 9, "description": "where to"},
            "side": {"type": "string", "enum": ["left", "right"]},
        },
        "required": ["book", "shelf"],
        "additionalProperties": False,
    }


def test_the_right_calls_in_any_way() -> None:
    conversation = begin()
    (found,) = conversation.step(calls(("find", {"title": "Dune"})))
    (moved,) = conversation.step(calls(("move", {"book": "book-1", "shelf": 3})))
    conversation.step(calls(("move", {"book": "book-1", "shelf": 5})))

    assert (found.role, found.content, found.tool_call_id) == ("tool", '["book-1"]', "0")
    assert moved.content == "moved"
    assert conversation.step(parse_response("Done.")) == ()
    assert conversation.verdict().outcome == "correct"


def test_calls_in_raw_text() -> None:
    conversation = begin()
    written = "<tool_call><function=move><parameter=book>book-1</parameter><parameter=shelf>5</parameter></function>"

    (answer,) = conversation.step(parse_response(f"<think>so</think>{written}</tool_call>"))

    assert answer.content == "moved" and conversation.verdict().outcome == "correct"


@pytest.mark.parametrize(
    "more",
    [
        [],
        [("move", {"book": "book-1", "shelf": 5}), ("move", {"book": "book-2", "shelf": 2})],
        [("move", {"book": "book-1", "shelf": 5}), ("buy", {"title": "Ulysses"})],
        [("move", {"book": "book-1", "shelf": 5}), ("burn", {"book": "book-2"})],
        [("move", {"book": "book-1", "shelf": 5, "side": "left"})],
        [("move", {"book": "book-1", "shelf": 6})],
    ],
)
def test_less_or_more_than_requested_is_wrong(more: list[tuple[str, dict[str, Any]]]) -> None:
    conversation = begin()
    conversation.step(calls(*more) if more else parse_response("I moved it."))

    verdict = conversation.verdict()

    assert verdict.outcome == "wrong" and "books" in verdict.reason


def test_undone_changes_do_not_count() -> None:
    conversation = begin()
    conversation.step(calls(("buy", {"title": "Ulysses"}), ("burn", {"book": "book-3"})))
    conversation.step(calls(("move", {"book": "book-2", "shelf": 9}), ("move", {"book": "book-2", "shelf": 1})))
    conversation.step(calls(("move", {"book": "book-1", "shelf": 5})))

    assert conversation.verdict().outcome == "correct"


def test_new_rows_in_any_order_and_case() -> None:
    bought = [{"name": "buy", "arguments": {"title": title}} for title in ("Ulysses", "Walden")]
    conversation = begin(calls=bought)
    conversation.step(calls(("buy", {"title": " WALDEN"}), ("buy", {"title": "ulysses"})))

    assert conversation.verdict().outcome == "correct"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("mvoe", {}, "did you mean 'move'"),
        ("move", {}, "book: Field required"),
        ("move", {"book": "book-1", "shelf": "5"}, "shelf: Input should be a valid integer"),
        ("move", {"book": "book-1", "shelf": 0}, "shelf: Input should be greater"),
        ("move", {"book": "book-9", "shelf": 5}, "there is no 'book-9'"),
        ("move", {"book": "book-1", "shelf": 5, "colour": 1}, "colour: Extra inputs"),
        ("move", {"book": "book-1", "shelf": float("nan")}, "arguments: cannot be written as JSON"),
        ("find", {"title": "\ud800"}, "arguments: cannot be written as JSON"),
        ("buy", {"title": "Dune"}, "we have it"),
    ],
)
def test_mistakes_come_back_as_text(name: str, arguments: dict[str, Any], said: str) -> None:
    conversation = begin()

    (answer,) = conversation.step(calls((name, arguments)))

    assert answer.content.startswith("Error: ") and said in answer.content
    assert conversation.step(calls(("move", {"book": "book-1", "shelf": 5})))
    assert conversation.verdict().outcome == "correct"


def test_a_broken_call_comes_back_as_text() -> None:
    (answer,) = begin().step(parse_response("<tool_call>{move}</tool_call>"))

    assert answer.role == "tool" and answer.content.startswith("Error: <tool_call>")


def test_a_tools_own_failure_is_not_the_models_fault() -> None:
    conversation = begin()

    assert conversation.step(calls(("crash", {}))) == ()
    assert conversation.step(calls(("move", {"book": "book-1", "shelf": 5}))) == ()
    assert conversation.verdict().outcome == "error"


def test_the_user_speaks_when_the_model_turns_to_them() -> None:
    conversation = begin(user=["The first.", "Yes."])
    (first,) = conversation.step(parse_response("Which?"))
    (tool,) = conversation.step(calls(("find", {"title": "Dune"}), text="One moment."))
    (second,) = conversation.step(parse_response("Shelf 5?"))

    assert (first.role, first.content) == ("user", "The first.")
    assert tool.role == "tool"
    assert (second.role, second.content) == ("user", "Yes.")


def test_silence_ends_it() -> None:
    assert begin(user=["The first."]).step(parse_response("<think>hm")) == ()


def test_no_more_turns_than_allowed() -> None:
    conversation = begin()
    for _ in range(3):
        assert conversation.step(calls(("find", {"title": "Dune"})))

    assert conversation.step(calls(("move", {"book": "book-1", "shelf": 5}))) == ()
    assert conversation.verdict().outcome == "correct"
    assert conversation.step(calls(("burn", {"book": "book-2"}))) == ()
    assert conversation.verdict().outcome == "correct"


def test_a_required_answer() -> None:
    for said, outcome in (
        ("The answer is shelf 2.", "correct"),
        ("The answer is **Shelf 2**. I looked it up.", "correct"),
        ("I looked:\n\n\\boxed{shelf 2}", "correct"),
        ("I looked.\nShelf 2.", "correct"),
        ("The answer is shelf 12.", "wrong"),
        ("Is it shelf 2?\nThe answer is shelf 3.", "wrong"),
        ("\\boxed{shelf 2} \\boxed{shelf 3}", "wrong"),
        ("One of these: shelf 1, shelf 2, shelf 3.", "wrong"),
        ("The answer is shelf 1 or shelf 2.", "wrong"),
        ("", "wrong"),
    ):
        conversation = begin(calls=[], answer="shelf 2")
        conversation.step(parse_response(said))

        assert conversation.verdict().outcome == outcome, said


def test_a_pickled_conversation_is_small_and_independent() -> None:
    conversation = begin(user=["Yes."])
    conversation.step(parse_response("May I?"))
    conversation.step(calls(("move", {"book": "book-1", "shelf": 5})))

    saved = pickle.dumps(conversation)
    again = pickle.loads(saved)
    again.step(calls(("burn", {"book": "book-2"})))

    assert b"Emma" not in saved and len(saved) < 1500
    assert again.verdict().outcome == "wrong"
    assert conversation.verdict().outcome == "correct"
    assert begin().verdict().outcome == "wrong"
    assert TABLES["books"]["book-1"]["shelf"] == 2


def test_a_long_answer_is_cut() -> None:
    conversation = begin()
    for _ in range(3):
        conversation.step(calls(*[("buy", {"title": "Emma"})] * 64))

    (answer,) = begin().step(calls(("find", {"title": "x" * 9000})))
    assert len(answer.content) < 5000
    assert conversation.verdict().outcome == "wrong"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"seed": 0}, "calls"),
        ({"seed": -1, "calls": []}, "reference.seed=-1"),
        ({"seed": 0, "calls": MOVE}, "reference.calls=.*list"),
        ({"seed": 0, "calls": [{"name": "move"}]}, r"reference\.calls\[0\]: the tool move rejects the call: book"),
        ({"seed": 0, "calls": [{"name": 1}]}, r"invalid tool call: reference\.calls\[0\]: name"),
        ({"seed": 0, "calls": []}, "doing nothing would be correct"),
        ({"seed": 0, "calls": [{"name": "find", "arguments": {"title": "Dune"}}]}, "doing nothing would be correct"),
        ({"seed": 0, "calls": [MOVE], "user": "Yes."}, "reference.user='Yes.'"),
        ({"seed": 0, "calls": [MOVE], "answer": 2}, "reference.answer=2"),
        ({"seed": 0, "calls": [MOVE], "usr": []}, "did you mean 'user'"),
    ],
)
def test_bad_references(reference: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(LIBRARY, reference)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="max_turns"):
        world_environment(LIBRARY, max_turns=0, style="any")
    with pytest.raises(ValueError, match="style"):
        world_environment(LIBRARY, max_turns=1, style="xml")  # type: ignore[arg-type]
