"""A workplace with five databases, a directory and 26 tools.

Nemotron 3 Nano, section 3.2.1: "a sandbox environment with five databases, 26 tools", adapted from WorkBench. The tools
are those of a small office, as in NeMo Gym's workplace_assistant; data, names and wording are this package's own.
"""

from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import AfterValidator, Field

from nemo_ext.job.seeds import generator
from nemo_ext.rl.worlds.world import Database, Row, Text, ToolError, World, one_of, paged, world_environment

NOW = datetime(2025, 6, 18, 9, 0)
_MINUTES, _DAY = "%Y-%m-%d %H:%M", "%Y-%m-%d"
_LAST = "9"  # sorts after all days and times

PEOPLE = (
    *("Aisha Khan", "Bruno Costa", "Carla Rossi", "Daniel Weber", "Elena Petrova", "Farid Haddad", "Grace Okafor"),
    *("Hugo Martin", "Ines Silva", "Jonas Berg", "Keiko Tanaka", "Luca Bianchi", "Maya Patel", "Nora Lind"),
    *("Omar Farouk", "Paula Mendez", "Quentin Roy", "Rosa Jimenez", "Samir Das", "Tessa Vogel"),
)
SUBJECTS = (
    *("Budget for the third quarter", "Office move", "Release checklist", "Travel to Bologna", "Interview notes"),
    *("Server outage", "Contract renewal", "Training day", "Security review", "Newsletter draft", "Invoice 2207"),
    *("Design feedback", "Holiday plan", "Customer survey", "Printer on floor two"),
)
MEETINGS = ("Stand-up", "Design review", "Planning", "Retrospective", "Budget meeting", "Interview", "Demo", "Workshop")
WORK = (
    *("Write release notes", "Fix login page", "Update price list", "Migrate database", "Test mobile app"),
    *("Draft privacy notice", "Review translations", "Add dark mode", "Speed up search", "Clean up backlog"),
    *("Document the API", "Replace old logo", "Plan user interviews", "Check backups"),
)
COMPANIES = ("Altona Foods", "Brightwater", "Cobalt Labs", "Delta Print", "Eastgate", "Fjord Energy", "Granite Works")

Board = Literal["Website", "Mobile", "Back end", "Marketing"]
State = Literal["Backlog", "In progress", "In review", "Done"]
Status = Literal["Lead", "Qualified", "Proposal", "Won", "Lost"]
Product = Literal["Starter", "Team", "Business"]
Source = Literal["search", "social", "referral", "direct"]
Metric = Literal["visits", "engaged_visits", "session_minutes"]
BOARDS, STATES, STATUSES, PRODUCTS, SOURCES = map(get_args, (Board, State, Status, Product, Source))


def _address(text: str) -> str:
    before, at, after = text.casefold().strip().partition("@")
    if not (before and at and "." in after) or any(character.isspace() for character in before + after):
        raise ToolError(f"{text!r} is not an email address")
    return f"{before}@{after}"


def _time(form: str, shown: str) -> AfterValidator:
    """Return a validator that normalizes a time in the `strptime` format `form`, shown to the model as `shown`."""

    def checked(text: str) -> str:
        try:
            return datetime.strptime(text, form).strftime(form)
        except ValueError:
            raise ToolError(f"{text!r} is not in the format {shown}") from None

    return AfterValidator(checked)


Address = Annotated[str, Field(description="an email address", max_length=200, min_length=3), AfterValidator(_address)]
Day = Annotated[str, Field(description="a day as YYYY-MM-DD", max_length=10), _time(_DAY, "YYYY-MM-DD")]
Time = Annotated[
    str, Field(description="a time as YYYY-MM-DD HH:MM", max_length=16), _time(_MINUTES, "YYYY-MM-DD HH:MM")
]
Query = Annotated[str, Field(description="words that must all be found; empty for all", max_length=200)]
Page = Annotated[int, Field(description="from 1, five rows a page", ge=1, le=1000)]
Minutes = Annotated[int, Field(description="length in minutes", ge=5, le=600)]
Id = Annotated[str, Field(max_length=40)]


def address(person: str) -> str:
    """Return a person's work email address."""
    return person.lower().replace(" ", ".") + "@northwind.example"


ME = address("Alex Moreau")


# directory


def find_email_address(database: Database, name: Text) -> Any:
    """Addresses of the colleagues whose name holds the given words."""
    wanted = name.casefold().split()
    return [row["address"] for _, row in database.rows("directory") if _contains(row["name"], wanted)]


# email


def search_emails(
    database: Database,
    query: Query = "",
    box: Literal["inbox", "sent"] | None = None,
    date_from: Day | None = None,
    date_to: Day | None = None,
    page: Page = 1,
) -> Any:
    """Emails whose subject, body or correspondent hold all words, the latest first."""
    found = _search(database, "emails", query, ("subject", "body", "correspondent"), box=box)
    found = [row for row in found if (date_from or "") <= row["sent"][:10] <= (date_to or _LAST)]
    return paged(sorted(found, key=lambda row: row["sent"], reverse=True), page, 5)


def get_email(database: Database, email_id: Id) -> Any:
    """One email."""
    return {"id": email_id, **database.get("emails", email_id)}


def send_email(database: Database, recipient: Address, subject: Text, body: Text) -> Any:
    """Send an email."""
    return _send(database, recipient, subject, body)


def reply_to_email(database: Database, email_id: Id, body: Text) -> Any:
    """Answer an email; its subject is kept."""
    email = database.get("emails", email_id)
    return _send(database, email["correspondent"], email["subject"], body)


def forward_email(database: Database, email_id: Id, recipient: Address) -> Any:
    """Send an email on to someone else, as it is."""
    email = database.get("emails", email_id)
    return _send(database, recipient, "FW: " + email["subject"], email["body"])


def delete_email(database: Database, email_id: Id) -> Any:
    """Delete an email."""
    database.delete("emails", email_id)
    return "deleted"


# calendar


def search_events(
    database: Database,
    query: Query = "",
    time_from: Time | None = None,
    time_to: Time | None = None,
    page: Page = 1,
) -> Any:
    """Events whose name or participant hold all words and that begin between the times, the earliest first."""
    found = _search(database, "events", query, ("name", "participant"))
    found = [row for row in found if (time_from or "") <= row["start"] <= (time_to or _LAST)]
    return paged(sorted(found, key=lambda row: row["start"]), page, 5)


def get_event(database: Database, event_id: Id) -> Any:
    """One event."""
    return {"id": event_id, **database.get("events", event_id)}


def create_event(database: Database, name: Text, participant: Address, start: Time, minutes: Minutes) -> Any:
    """Put an event into the calendar."""
    row = {"name": name, "participant": participant, "start": start, "minutes": minutes}
    return {"id": database.insert("events", row, "event-")}


def update_event(
    database: Database,
    event_id: Id,
    name: Text | None = None,
    participant: Address | None = None,
    start: Time | None = None,
    minutes: Minutes | None = None,
) -> Any:
    """Change what is given of an event."""
    return _update(database, "events", event_id, name=name, participant=participant, start=start, minutes=minutes)


def delete_event(database: Database, event_id: Id) -> Any:
    """Take an event out of the calendar."""
    database.delete("events", event_id)
    return "deleted"


# projects


def search_tasks(
    database: Database,
    query: Query = "",
    board: Board | None = None,
    state: State | None = None,
    assigned_to: Address | None = None,
    due_before: Day | None = None,
    page: Page = 1,
) -> Any:
    """Tasks whose name holds all words, by board, state, assignee and due day (before it), the earliest due first."""
    found = _search(database, "tasks", query, ("name",), board=board, state=state, assigned_to=assigned_to)
    found = [row for row in found if row["due"] < (due_before or _LAST)]
    return paged(sorted(found, key=lambda row: (row["due"], row["id"])), page, 5)


def get_task(database: Database, task_id: Id) -> Any:
    """One task."""
    return {"id": task_id, **database.get("tasks", task_id)}


def create_task(database: Database, name: Text, board: Board, state: State, assigned_to: Address, due: Day) -> Any:
    """Add a task to a board."""
    row = {"name": name, "board": board, "state": state, "assigned_to": _colleague(database, assigned_to)}
    return {"id": database.insert("tasks", {**row, "due": due}, "task-")}


def update_task(
    database: Database,
    task_id: Id,
    name: Text | None = None,
    board: Board | None = None,
    state: State | None = None,
    assigned_to: Address | None = None,
    due: Day | None = None,
) -> Any:
    """Change what is given of a task."""
    colleague = None if assigned_to is None else _colleague(database, assigned_to)
    given = {"name": name, "board": board, "state": state, "assigned_to": colleague, "due": due}
    return _update(database, "tasks", task_id, **given)


def delete_task(database: Database, task_id: Id) -> Any:
    """Delete a task."""
    database.delete("tasks", task_id)
    return "deleted"


# customers


def search_customers(
    database: Database,
    query: Query = "",
    status: Status | None = None,
    product: Product | None = None,
    assigned_to: Address | None = None,
    page: Page = 1,
) -> Any:
    """Customers whose name, company or address hold all words, by status, product and assignee, by name."""
    given = {"status": status, "product": product, "assigned_to": assigned_to}
    found = _search(database, "customers", query, ("name", "company", "address"), **given)
    return paged(sorted(found, key=lambda row: (row["name"], row["id"])), page, 5)


def add_customer(
    database: Database, name: Text, company: Text, address: Address, status: Status, product: Product
) -> Any:
    """Add a customer, who is assigned to you."""
    row = {"name": name, "company": company, "address": address, "status": status, "product": product}
    return {"id": database.insert("customers", {**row, "assigned_to": ME}, "customer-")}


def update_customer(
    database: Database,
    customer_id: Id,
    status: Status | None = None,
    product: Product | None = None,
    assigned_to: Address | None = None,
) -> Any:
    """Change what is given of a customer."""
    colleague = None if assigned_to is None else _colleague(database, assigned_to)
    return _update(database, "customers", customer_id, status=status, product=product, assigned_to=colleague)


def delete_customer(database: Database, customer_id: Id) -> Any:
    """Delete a customer."""
    database.delete("customers", customer_id)
    return "deleted"


# analytics


def list_visits(database: Database, day: Day, page: Page = 1) -> Any:
    """The visits of one day."""
    return paged(_search(database, "visits", "", (), day=day), page, 5)


def count_visits(database: Database, date_from: Day, date_to: Day, source: Source | None = None) -> Any:
    """How many visits there were from one day to another, both included."""
    return len(visits(database, date_from, date_to, source))


def count_engaged_visits(database: Database, date_from: Day, date_to: Day, source: Source | None = None) -> Any:
    """How many of the visits were engaged."""
    return sum(row["engaged"] for row in visits(database, date_from, date_to, source))


def average_session_minutes(database: Database, date_from: Day, date_to: Day, source: Source | None = None) -> Any:
    """The mean length of a visit in minutes, to one decimal."""
    found = visits(database, date_from, date_to, source)
    return round(sum(row["minutes"] for row in found) / len(found), 1) if found else 0.0


def create_plot(database: Database, metric: Metric, kind: Literal["bar", "line"], date_from: Day, date_to: Day) -> Any:
    """Make a plot of a metric from one day to another and keep it."""
    row = {"metric": metric, "kind": kind, "from": date_from, "to": date_to}
    return {"id": database.insert("plots", row, "plot-")}


def build(seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Build the tables for a seed; return a mapping from their names to mappings from ids to rows."""
    random = generator(seed, "workplace")
    staff = [str(person) for person in random.choice(PEOPLE, size=10, replace=False)]
    tables: dict[str, dict[str, dict[str, Any]]] = {
        name: {} for name in ("directory", "emails", "events", "tasks", "customers", "visits", "plots")
    }
    for n, name in enumerate(staff, start=1):
        tables["directory"][f"person-{n}"] = {"name": name, "address": address(name)}

    def person() -> str:
        return address(one_of(random, staff))

    # Times and days are distinct, so that "the last" and "the first" are unambiguous.
    for n, hour in enumerate(np.sort(random.choice(24 * 30, size=24, replace=False)), start=1):
        subject = one_of(random, SUBJECTS)
        tables["emails"][f"email-{n}"] = {
            "box": "sent" if random.random() < 0.2 else "inbox",
            "correspondent": person(),
            "subject": subject,
            "body": f"Hello, a few words on this: {subject.lower()}. Please tell me what you think.",
            "sent": (NOW - timedelta(hours=int(24 * 30 - hour), minutes=int(random.integers(1, 59)))).strftime(
                _MINUTES
            ),
        }
    for n, slot in enumerate(np.sort(random.choice(40 * 8, size=20, replace=False)), start=1):
        start = NOW + timedelta(days=int(slot // 8), hours=int(slot % 8))
        tables["events"][f"event-{n}"] = {
            "name": one_of(random, MEETINGS),
            "participant": person(),
            "start": start.strftime(_MINUTES),
            "minutes": int(random.choice([30, 45, 60])),
        }
    for n, day in enumerate(random.choice(np.arange(-20, 40), size=24, replace=False), start=1):
        tables["tasks"][f"task-{n}"] = {
            "name": one_of(random, WORK),
            "board": one_of(random, BOARDS),
            "state": one_of(random, STATES),
            "assigned_to": person(),
            "due": (NOW + timedelta(days=int(day))).strftime(_DAY),
        }
    strangers = [name for name in PEOPLE if name not in staff]
    for n, name in enumerate(strangers, start=1):
        company = one_of(random, COMPANIES)
        tables["customers"][f"customer-{n}"] = {
            "name": name,
            "company": company,
            "address": f"{name.split()[0].lower()}@{company.lower().replace(' ', '')}.example",
            "status": one_of(random, STATUSES),
            "product": one_of(random, PRODUCTS),
            "assigned_to": person(),
        }
    for n in range(1, 61):
        tables["visits"][f"visit-{n}"] = {
            "day": (NOW - timedelta(days=int(random.integers(1, 15)))).strftime(_DAY),
            "source": one_of(random, SOURCES),
            "engaged": bool(random.random() < 0.4),
            "minutes": int(random.integers(1, 30)),
        }
    return tables


WORLD = World(
    name="workplace",
    build=build,
    tools=(
        *(find_email_address, search_emails, get_email, send_email, reply_to_email, forward_email, delete_email),
        *(search_events, get_event, create_event, update_event, delete_event),
        *(search_tasks, get_task, create_task, update_task, delete_task),
        *(search_customers, add_customer, update_customer, delete_customer),
        *(list_visits, count_visits, count_engaged_visits, average_session_minutes, create_plot),
    ),
    prompt=(
        f"You assist Alex Moreau, {ME}, at work. It is {NOW:%A}, {NOW:%Y-%m-%d %H:%M}. Use the tools to do what is "
        "asked, and nothing else. Texts that are given in quotes are used word for word."
    ),
)


environment = partial(world_environment, WORLD, max_turns=6, style="any")
"""Creates the environment `workplace`, with six turns as in NeMo Gym's workplace_assistant."""


def visits(database: Database, date_from: str, date_to: str, source: str | None) -> list[Row]:
    """Return the visits between two days, both included, from one source, or from all if it is None."""
    return [row for row in _search(database, "visits", "", (), source=source) if date_from <= row["day"] <= date_to]


def _send(database: Database, recipient: str, subject: str, body: str) -> Any:
    row = {"box": "sent", "correspondent": recipient, "subject": subject, "body": body}
    return {"id": database.insert("emails", {**row, "sent": NOW.strftime(_MINUTES)}, "email-")}


def _update(database: Database, table: str, key: str, **given: Any) -> Any:
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        raise ToolError("no field to change was given")
    database.update(table, key, **values)
    return {"id": key, **database.get(table, key)}


def _search(database: Database, table: str, query: str, columns: tuple[str, ...], **given: Any) -> list[Row]:
    """Return the rows, with ids, that have all query words in `columns` and match all values in `given` except None."""
    words = query.casefold().split()
    return [
        {"id": key, **row}
        for key, row in database.rows(table)
        if _contains(" ".join(row[column] for column in columns), words)
        and all(value is None or row[name] == value for name, value in given.items())
    ]


def _contains(text: str, words: list[str]) -> bool:
    plain = text.casefold()
    return all(word in plain for word in words)


def _colleague(database: Database, address: str) -> str:
    if address != ME and all(row["address"] != address for _, row in database.rows("directory")):
        raise ToolError(f"no colleague has the address {address}")
    return address
