"""Conversations at the service desk of `nemo_ext.rl.worlds.bank`, in three levels.

1  the customer states customer number, date of birth and one request all at once
2  the model must ask for the date of birth
3  the model must also look up the number by name; there are two requests, or one that must be met in a different way
"""

from collections.abc import Iterator

import numpy as np

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels
from nemo_ext.rl.worlds.bank import STREETS, WORLD
from nemo_ext.rl.worlds.world import Call, Database, Row, call_of, one_of, solution_calls

LEVELS = 3

Wish = tuple[str, list[Call]]


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate service-desk conversations at one level, or at all levels in turn."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "bank-tasks", task_level, index)
        tables = int(random.integers(1000))
        database = WORLD.database(tables)
        customer, row = one_of(random, list(database.rows("customers")))
        wishes = _wishes(random, database, customer, task_level)
        who = f"My name is {row['name']}."
        if task_level < 3:
            who += f" My customer number is {customer}."
        born = f"I was born on {row['birth_date']}."
        opening = " ".join([who, *([born] if task_level == 1 else []), *(said for said, _ in wishes)])
        calls = [call_of("verify_identity", customer_id=customer, birth_date=row["birth_date"])]
        yield Task(
            id=f"bank/{seed}/{task_level}/{index}",
            environment="bank",
            prompt=(Message(role="system", content=WORLD.prompt), Message(role="user", content=opening)),
            reference={
                "seed": tables,
                "calls": [*calls, *(call for _, made in wishes for call in made)],
                "user": [] if task_level == 1 else [born, "Yes, please do."],
            },
            tools=WORLD.schemas,
            domain="bank",
        )


def solution(task: Task) -> tuple[ToolCall, ...]:
    """Return the correct tool calls for the customer's requests."""
    return solution_calls(task.reference)


def _wishes(random: np.random.Generator, database: Database, customer: str, level: int) -> list[Wish]:
    if level < 3:
        return [one_of(random, _SIMPLE)(random, database, customer)]
    if random.random() < 0.3:
        return [_stolen(random, database, customer)]
    chosen = [_SIMPLE[int(place)] for place in random.permutation(len(_SIMPLE))[:2]]
    return [wish(random, database, customer) for wish in chosen]


def _unblock(random: np.random.Generator, database: Database, customer: str) -> Wish:
    key, card = _card(database, customer, "blocked by PIN")
    return f"I typed a wrong PIN and my {card['kind']} card is blocked: please unblock it.", [
        call_of("unblock_card", card_id=key)
    ]


def _raise_limit(random: np.random.Generator, database: Database, customer: str) -> Wish:
    key, card = _card(database, customer, "active")
    limit = card["limit"] // 100 + 100 * int(random.integers(1, 9))
    said = f"Please set the monthly limit of my {card['kind']} card to {limit} euros."
    return said, [call_of("set_card_limit", card_id=key, limit=limit)]


def _move_house(random: np.random.Generator, database: Database, customer: str) -> Wish:
    address = f"{int(random.integers(91, 200))} {one_of(random, STREETS)}"
    return f"I have moved: my new address is {address}.", [
        call_of("update_address", customer_id=customer, address=address)
    ]


def _save(random: np.random.Generator, database: Database, customer: str) -> Wish:
    own = {row["kind"]: key for key, row in database.rows("accounts") if row["customer"] == customer}
    amount = int(random.integers(20, 400))
    said = f"Please move {amount} euros from my checking account to my savings account."
    return said, [call_of("transfer", from_account=own["checking"], to_account=own["savings"], amount=amount)]


def _dispute(random: np.random.Generator, database: Database, customer: str) -> Wish:
    disputed = {row["transaction"] for _, row in database.rows("disputes")}
    payments = [item for item in _own(database, customer, "transactions") if item[0] not in disputed]
    key, payment = one_of(random, payments)
    why, reason = one_of(random, _REASONS)
    said = f"I want to dispute the payment to {payment['merchant']}: {why}."
    return said, [call_of("open_dispute", transaction_id=key, reason=reason)]


_REASONS = (
    ("I never made it", "not made by the customer"),
    ("the goods never arrived", "goods not received"),
    ("the amount is wrong", "wrong amount"),
)


def _settled(random: np.random.Generator, database: Database, customer: str) -> Wish:
    payments = dict(_own(database, customer, "transactions"))
    key, row = next(item for item in database.rows("disputes") if item[1]["transaction"] in payments)
    said = f"{payments[row['transaction']]['merchant']} has paid me back: please withdraw my dispute."
    return said, [call_of("withdraw_dispute", dispute_id=key)]


def _stolen(random: np.random.Generator, database: Database, customer: str) -> Wish:
    if random.random() < 0.5:
        key, card = _card(database, customer, "blocked: stolen")
        said = (
            f"My {card['kind']} card, which I had reported as stolen, turned up. Make it usable, or whatever is right."
        )
        return said, [call_of("replace_card", card_id=key)]
    key, card = _card(database, customer, "active")
    said = f"My {card['kind']} card was stolen. Please block it and send me a new one."
    return said, [call_of("block_card", card_id=key, reason="stolen"), call_of("replace_card", card_id=key)]


_SIMPLE = (_unblock, _raise_limit, _move_house, _save, _dispute, _settled)


def _card(database: Database, customer: str, state: str) -> tuple[str, Row]:
    return next(item for item in _own(database, customer, "cards") if item[1]["state"] == state)


def _own(database: Database, customer: str, table: str) -> list[tuple[str, Row]]:
    """Return the rows of a table that belong to the customer's accounts."""
    own = {key for key, row in database.rows("accounts") if row["customer"] == customer}
    return [item for item in database.rows(table) if item[1]["account"] in own]
