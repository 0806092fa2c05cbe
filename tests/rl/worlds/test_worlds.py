"""Tools of the workplace and the bank, which no call by a model can break."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.chat.tool_calls import call_problem, check_tools
from nemo_ext.rl.environments import make
from nemo_ext.rl.worlds import bank, workplace
from nemo_ext.rl.worlds.world import ToolError, World

WORLDS = (workplace.WORLD, bank.WORLD)
CHANGE = {
    "workplace": {"name": "delete_event", "arguments": {"event_id": "event-1"}},
    "bank": {"name": "verify_identity", "arguments": {"customer_id": "customer-1", "birth_date": ""}},
}


def ask(world: World, database: Any, tool: str, **arguments: Any) -> str:
    return world.carry_out(database, ToolCall(name=tool, arguments=arguments))


def test_sizes_as_published() -> None:
    tables = workplace.build(0)

    assert len(workplace.WORLD.tools) == 26
    assert {"emails", "events", "tasks", "customers", "visits"} < set(tables)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_tables_depend_on_the_seed_alone(world: World) -> None:
    assert world.build(3) == world.build(3)
    assert world.build(3) != world.build(4)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_every_tool_is_declared(world: World) -> None:
    tools = check_tools(world.schemas, "tools")

    assert [tool["function"]["name"] for tool in tools] == [run.__name__ for run in world.tools]
    assert all(tool["function"]["description"].endswith(".") for tool in tools)
    assert "null" not in str(tools)


def test_workplace_searches() -> None:
    world, database = workplace.WORLD, workplace.WORLD.database(0)
    (key, row), *_ = [item for item in database.rows("emails") if item[1]["box"] == "inbox"]
    name = row["correspondent"].split(".")[0]

    assert row["correspondent"] in ask(world, database, "find_email_address", name=name.upper())
    assert key in ask(world, database, "search_emails", query=f"{name} {row['subject'].lower()}", page=1)
    assert '"found": 0' in ask(world, database, "search_emails", query="zeppelin")
    assert key not in ask(world, database, "search_emails", query=row["subject"], date_from="2025-06-18")
    assert key in ask(world, database, "search_emails", query=f"{name} {row['subject']}", box="inbox")
    assert key not in ask(world, database, "search_emails", query=f"{name} {row['subject']}", box="sent")
    with pytest.raises(ToolError, match="YYYY-MM-DD"):
        ask(world, database, "search_emails", date_from="18/06/25")
    assert database.changes() == {}


def test_workplace_changes() -> None:
    world, database = workplace.WORLD, workplace.WORLD.database(0)
    person = next(row["address"] for _, row in database.rows("directory"))
    email = next(key for key, _ in database.rows("emails"))

    ask(world, database, "reply_to_email", email_id=email, body="Yes.")
    ask(world, database, "forward_email", email_id=email, recipient=person)
    ask(world, database, "create_event", name="Demo", participant=person, start="2025-07-01 10:00", minutes=30)
    ask(world, database, "create_plot", metric="visits", kind="bar", date_from="2025-06-01", date_to="2025-06-07")
    ask(world, database, "add_customer", name="A", company="B", address="a@b.example", status="Lead", product="Team")

    assert {table: len(rows) for table, rows in database.changes().items()} == {
        "customers": 1,
        "emails": 2,
        "events": 1,
        "plots": 1,
    }
    with pytest.raises(ToolError, match="no colleague has"):
        ask(world, database, "update_task", task_id="task-1", assigned_to="a@b.example")
    with pytest.raises(ToolError, match="not an email address"):
        ask(world, database, "send_email", recipient="nobody", subject="a", body="b")


def test_analytics_count_the_visits() -> None:
    world, database = workplace.WORLD, workplace.WORLD.database(0)
    days = {"date_from": "2025-06-01", "date_to": "2025-06-18"}
    rows = [row for _, row in database.rows("visits")]

    assert ask(world, database, "count_visits", **days) == str(len(rows)) == "60"
    assert ask(world, database, "count_engaged_visits", **days) == str(sum(row["engaged"] for row in rows))
    by_source = [int(ask(world, database, "count_visits", **days, source=each)) for each in workplace.SOURCES]
    assert sum(by_source) == 60


def verified(seed: int = 0) -> tuple[Any, str]:
    database = bank.WORLD.database(seed)
    key, row = next(iter(database.rows("customers")))
    ask(bank.WORLD, database, "verify_identity", customer_id=key, birth_date=row["birth_date"])
    return database, key


def test_the_bank_refuses_everything_before_the_customer_is_verified() -> None:
    database = bank.WORLD.database(0)
    card = next(key for key, _ in database.rows("cards"))

    for name, arguments in (
        ("list_accounts", {"customer_id": "customer-1"}),
        ("list_transactions", {"account_id": "account-1"}),
        ("unblock_card", {"card_id": card}),
        ("update_address", {"customer_id": "customer-1", "address": "here"}),
        ("transfer", {"from_account": "account-1", "to_account": "account-2", "amount": 1}),
    ):
        with pytest.raises(ToolError, match="not verified"):
            ask(bank.WORLD, database, name, **arguments)
    assert database.changes() == {}


def test_a_guessed_date_is_a_change() -> None:
    database, key = bank.WORLD.database(0), "customer-1"

    assert ask(bank.WORLD, database, "verify_identity", customer_id=key, birth_date="1970-01-01").startswith("Error")
    assert list(database.changes()) == ["customers"]


def test_the_banks_rules() -> None:
    database, customer = verified()
    own = [key for key, row in database.rows("accounts") if row["customer"] == customer]
    cards = {row["state"]: key for key, row in database.rows("cards") if row["account"] in own}

    with pytest.raises(ToolError, match="only cards blocked by PIN"):
        ask(bank.WORLD, database, "unblock_card", card_id=cards["blocked: stolen"])
    with pytest.raises(ToolError, match="block it first"):
        ask(bank.WORLD, database, "replace_card", card_id=cards["active"])
    with pytest.raises(ToolError, match="10000 at most"):
        ask(bank.WORLD, database, "set_card_limit", card_id=cards["active"], limit=10_001)
    with pytest.raises(ToolError, match="two decimals"):
        ask(bank.WORLD, database, "transfer", from_account=own[0], to_account=own[1], amount=1.001)
    with pytest.raises(ToolError, match="the balance is"):
        ask(bank.WORLD, database, "transfer", from_account=own[0], to_account=own[1], amount=999_999)
    other = next(key for key, row in database.rows("accounts") if row["customer"] != customer)
    with pytest.raises(ToolError, match="not verified"):
        ask(bank.WORLD, database, "transfer", from_account=other, to_account=own[0], amount=1)


def test_transfers_preserve_the_total() -> None:
    database, customer = verified()
    own = [key for key, row in database.rows("accounts") if row["customer"] == customer]
    before = sum(row["balance"] for _, row in database.rows("accounts"))

    ask(bank.WORLD, database, "transfer", from_account=own[0], to_account=own[1], amount=12.34)
    ask(bank.WORLD, database, "transfer", from_account=own[1], to_account=own[0], amount=12.34)

    assert sum(row["balance"] for _, row in database.rows("accounts")) == before
    assert len(database.changes()["transactions"]) == 4  # a transfer and its reversal leave two rows each


keys = [f"{kind}-{n}" for kind in ("email", "event", "task", "customer", "account", "card", "dispute") for n in (1, 2)]
values = st.one_of(
    st.sampled_from([*keys, "2025-06-20", "2025-06-20 10:00", "9999-99-99", "a@b.example", "@", "Lead", "bar", ""]),
    st.integers(-3, 2000),
    st.floats(),
    st.none(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.none(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
@given(data=st.data())
def test_no_call_breaks_a_world(world: World, data: st.DataObject) -> None:
    environment = make(world.name)
    assert environment.begin is not None
    database = world.database(1)
    change = dict(CHANGE[world.name])
    conversation: Any = environment.begin(environment.check({"seed": 1, "calls": [change]}))
    made = []
    for _ in range(data.draw(st.integers(1, 6))):
        tool = data.draw(st.sampled_from(world.schemas))["function"]
        known = {name: values for name in tool["parameters"]["properties"]}
        arguments = data.draw(st.fixed_dictionaries({}, optional=known) | st.dictionaries(st.text(max_size=4), values))
        made.append(ToolCall(name=tool["name"], arguments=arguments))

    answers = conversation.step(Response(text="", tool_calls=tuple(made)))

    assert len(answers) == len(made) and all(answer.content.encode() for answer in answers)
    assert conversation.failure == ""
    assert conversation.verdict().outcome in ("correct", "wrong")
    assert dict(database.rows(next(iter(world.build(1))))) == dict(world.build(1)[next(iter(world.build(1)))])


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
@given(data=st.data())
def test_schemas_allow_all_arguments_that_tools_accept(world: World, data: st.DataObject) -> None:
    """Otherwise engines that constrain decoding by the schema would prevent correct calls."""
    database = world.database(1)
    tool = data.draw(st.sampled_from(world.schemas))["function"]
    known = {name: values for name in tool["parameters"]["properties"]}
    call = ToolCall(name=tool["name"], arguments=data.draw(st.fixed_dictionaries({}, optional=known)))

    try:
        world.carry_out(database, call)
    except ToolError:
        return
    given = {name: value for name, value in call.arguments.items() if value is not None}
    assert call_problem(ToolCall(name=call.name, arguments=given), world.schemas) == ""
