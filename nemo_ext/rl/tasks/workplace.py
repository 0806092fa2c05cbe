"""Tasks in the office of `nemo_ext.rl.worlds.workplace`, in three levels.

1  one change to a row that is found by one or two searches
2  the same change to several rows, or a change to a row that must be selected among several
3  a condition, or changes in two databases

Wording and rows are drawn from the seed; the reference contains the correct tool calls for these tables.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import numpy as np

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels
from nemo_ext.rl.worlds import workplace
from nemo_ext.rl.worlds.workplace import BOARDS, COMPANIES, MEETINGS, NOW, PRODUCTS, SOURCES, SUBJECTS, WORK, WORLD
from nemo_ext.rl.worlds.world import Call, Database, Row, call_of, one_of, solution_calls

LEVELS = 3

Draft = tuple[str, list[Call]]

_TEXTS = (
    "Thank you, I will look at it tomorrow.",
    "Agreed, please go ahead.",
    "Could we talk about this on Friday?",
    "I need two more days for this.",
    "Please send me the latest numbers.",
)
_MOST = 4
"""Maximum number of rows to change in one task, so that it can be done within the allowed turns."""


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate office tasks at one level, or at all levels in turn."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "workplace-tasks", task_level, index)
        tables = int(random.integers(1000))
        database = WORLD.database(tables)
        draft: Draft | None = None
        while draft is None:  # not every table has rows for every template
            draft = one_of(random, _TEMPLATES[task_level])(random, database)
        question, calls = draft
        yield Task(
            id=f"workplace/{seed}/{task_level}/{index}",
            environment="workplace",
            prompt=(Message(role="system", content=WORLD.prompt), Message(role="user", content=question)),
            reference={"seed": tables, "calls": calls},
            tools=WORLD.schemas,
            domain="workplace",
        )


def solution(task: Task) -> tuple[ToolCall, ...]:
    """Return a task's correct tool calls."""
    return solution_calls(task.reference)


def _reply(random: np.random.Generator, database: Database) -> Draft | None:
    inbox = [(key, row) for key, row in database.rows("emails") if row["box"] == "inbox"]
    _, chosen = one_of(random, inbox)
    same = [
        (row["sent"], key)
        for key, row in inbox
        if (row["correspondent"], row["subject"]) == (chosen["correspondent"], chosen["subject"])
    ]
    text = one_of(random, _TEXTS)
    question = f"Reply to {_first(chosen['correspondent'])}'s last email about '{chosen['subject']}' with '{text}'"
    return question, [call_of("reply_to_email", email_id=max(same)[1], body=text)]


def _cancel_next(random: np.random.Generator, database: Database) -> Draft | None:
    key, row = _next_event(random, database)
    person = _first(row["participant"])
    return f"Cancel my next {row['name']} with {person}.", [call_of("delete_event", event_id=key)]


def _move_next(random: np.random.Generator, database: Database) -> Draft | None:
    key, row = _next_event(random, database)
    start = datetime.fromisoformat(row["start"]) + timedelta(days=int(random.integers(1, 5)))
    question = f"Move my next {row['name']} with {_first(row['participant'])} to {start:%Y-%m-%d} at the same time."
    return question, [call_of("update_event", event_id=key, start=f"{start:%Y-%m-%d %H:%M}")]


def _meet(random: np.random.Generator, database: Database) -> Draft | None:
    person, name = _colleague(random, database), one_of(random, MEETINGS)
    start = (NOW + timedelta(days=int(random.integers(1, 20)))).replace(hour=int(random.integers(9, 17)))
    minutes = int(random.choice([30, 45, 60]))
    question = (
        f"Put a {name} with {_first(person)} into my calendar: {start:%Y-%m-%d} at {start:%H:%M}, {minutes} minutes."
    )
    call = call_of("create_event", name=name, participant=person, start=f"{start:%Y-%m-%d %H:%M}", minutes=minutes)
    return question, [call]


def _new_task(random: np.random.Generator, database: Database) -> Draft | None:
    person, name, board = _colleague(random, database), one_of(random, WORK), one_of(random, BOARDS)
    due = f"{NOW + timedelta(days=int(random.integers(3, 30))):%Y-%m-%d}"
    question = f"Add the task '{name}' to the backlog of the board {board}, for {_first(person)}, due {due}."
    return question, [call_of("create_task", name=name, board=board, state="Backlog", assigned_to=person, due=due)]


def _new_customer(random: np.random.Generator, database: Database) -> Draft | None:
    name, company, product = "Sofia Marin", one_of(random, COMPANIES), one_of(random, PRODUCTS)
    mail = f"sofia@{company.lower().replace(' ', '')}.example"
    question = f"Add {name} of {company} ({mail}) to my customers, as a lead for the product {product}."
    call = call_of("add_customer", name=name, company=company, address=mail, status="Lead", product=product)
    return question, [call]


def _forward(random: np.random.Generator, database: Database) -> Draft | None:
    inbox = [(row["sent"], key, row) for key, row in database.rows("emails") if row["box"] == "inbox"]
    _, _, chosen = one_of(random, inbox)
    _, key, _ = max((each for each in inbox if each[2]["correspondent"] == chosen["correspondent"]), key=lambda e: e[0])
    person = _colleague(random, database, but=chosen["correspondent"])
    question = f"Forward the last email that {_first(chosen['correspondent'])} sent me to {_first(person)}."
    return question, [call_of("forward_email", email_id=key, recipient=person)]


def _reassign(random: np.random.Generator, database: Database) -> Draft | None:
    person = _colleague(random, database)
    other = _colleague(random, database, but=person)
    found = [key for key, row in database.rows("tasks") if row["assigned_to"] == person and row["state"] != "Done"]
    question = f"{_first(person)} is ill. Give all tasks of theirs that are not done to {_first(other)}."
    return _for_each(found, lambda key: call_of("update_task", task_id=key, assigned_to=other), question)


def _overdue(random: np.random.Generator, database: Database) -> Draft | None:
    board, today = one_of(random, BOARDS), f"{NOW:%Y-%m-%d}"
    due = f"{NOW + timedelta(days=int(random.integers(5, 15))):%Y-%m-%d}"
    found = [
        key
        for key, row in database.rows("tasks")
        if row["board"] == board and row["due"] < today and row["state"] != "Done"
    ]
    question = f"All tasks on the board {board} that were due before today and are not done are now due on {due}."
    return _for_each(found, lambda key: call_of("update_task", task_id=key, due=due), question)


def _hand_over(random: np.random.Generator, database: Database) -> Draft | None:
    person, product = _colleague(random, database), one_of(random, PRODUCTS)
    found = [
        key
        for key, row in database.rows("customers")
        if row["product"] == product and row["status"] == "Lead" and row["assigned_to"] != person
    ]
    question = f"{_first(person)} takes over: assign all leads for the product {product} to {_first(person)}."
    return _for_each(found, lambda key: call_of("update_customer", customer_id=key, assigned_to=person), question)


def _clear_day(random: np.random.Generator, database: Database) -> Draft | None:
    person = _colleague(random, database)
    events = [key for key, row in database.rows("events") if row["participant"] == person]
    subject, text = one_of(random, SUBJECTS), one_of(random, _TEXTS)
    question = (
        f"Cancel all my meetings with {_first(person)} and write an email to {_first(person)} "
        f"with the subject '{subject}' and the text '{text}'"
    )
    draft = _for_each(events, lambda key: call_of("delete_event", event_id=key), question)
    if draft is not None:
        draft[1].append(call_of("send_email", recipient=person, subject=subject, body=text))
    return draft


def _won(random: np.random.Generator, database: Database) -> Draft | None:
    open_ones = [(key, row) for key, row in database.rows("customers") if row["status"] not in ("Won", "Lost")]
    if not open_ones:
        return None
    key, row = one_of(random, open_ones)
    due, name = f"{NOW + timedelta(days=int(random.integers(5, 20))):%Y-%m-%d}", f"Welcome {row['company']}"
    question = (
        f"{row['name']} of {row['company']} has signed. Set them to won, and add the task '{name}' to the backlog "
        f"of the board Marketing, due {due}, for whoever the customer is assigned to."
    )
    task = call_of(
        "create_task", name=name, board="Marketing", state="Backlog", assigned_to=row["assigned_to"], due=due
    )
    return question, [call_of("update_customer", customer_id=key, status="Won"), task]


def _traffic(random: np.random.Generator, database: Database) -> Draft | None:
    source, person = one_of(random, SOURCES), _colleague(random, database)
    low, high = f"{NOW - timedelta(days=7):%Y-%m-%d}", f"{NOW - timedelta(days=1):%Y-%m-%d}"
    count = len(workplace.visits(database, low, high, source))
    limit = max(0, count + int(random.choice([-2, -1, 0, 1, 2])))
    subject, text = "Visits", f"We had few visits from {source}."
    question = (
        f"If there were more than {limit} visits from {source} from {low} to {high}, make a bar plot of the visits of "
        f"these days; if not, write an email to {_first(person)} with the subject '{subject}' and the text '{text}'"
    )
    if count > limit:
        return question, [call_of("create_plot", metric="visits", kind="bar", date_from=low, date_to=high)]
    return question, [call_of("send_email", recipient=person, subject=subject, body=text)]


def _free(random: np.random.Generator, database: Database) -> Draft | None:
    person = _colleague(random, database)
    day = NOW + timedelta(days=int(random.integers(1, 20)))
    start = day.replace(hour=int(random.integers(9, 17)), minute=0)
    taken = any(row["start"].startswith(f"{day:%Y-%m-%d}") for _, row in database.rows("events"))
    question = (
        f"If I have no event on {day:%Y-%m-%d}, put a Demo with {_first(person)} there, at {start:%H:%M} for 30 "
        f"minutes; if I have one, write to {_first(person)} with the subject 'Demo' and the text 'That day is taken.'"
    )
    if taken:
        return question, [call_of("send_email", recipient=person, subject="Demo", body="That day is taken.")]
    call = call_of("create_event", name="Demo", participant=person, start=f"{start:%Y-%m-%d %H:%M}", minutes=30)
    return question, [call]


_TEMPLATES: dict[int, tuple[Callable[[np.random.Generator, Database], Draft | None], ...]] = {
    1: (_reply, _cancel_next, _meet, _new_task, _new_customer),
    2: (_move_next, _forward, _reassign, _overdue, _hand_over),
    3: (_clear_day, _won, _traffic, _free),
}


def _for_each(found: list[str], call: Callable[[str], Call], question: str) -> Draft | None:
    return (question, [call(key) for key in found]) if 1 <= len(found) <= _MOST else None


def _next_event(random: np.random.Generator, database: Database) -> tuple[str, Row]:
    """Draw an event; return the id and row of the earliest event with the same name and participant."""
    events = sorted(database.rows("events"), key=lambda item: item[1]["start"])
    _, chosen = one_of(random, events)
    pair = (chosen["name"], chosen["participant"])
    return next((key, row) for key, row in events if (row["name"], row["participant"]) == pair)


def _colleague(random: np.random.Generator, database: Database, but: str = "") -> str:
    return str(one_of(random, [row["address"] for _, row in database.rows("directory") if row["address"] != but]))


def _first(address: str) -> str:
    return address.split(".")[0].capitalize()
