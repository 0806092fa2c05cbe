"""A bank's service desk: customers, accounts, cards, transactions and disputes, and a customer to talk to.

Nemotron 3 Nano, section 3.2.1, names such an environment: it "tests an agent's tool-calling and proactive asking
capability" in "banking scenarios like assisting customers with unblocking a credit card or solving account disputes",
verified by the databases' state. The paper gives no further details, so data, tools and rules are this package's own.
After each response without a tool call, the customer says the next of the task's messages.
"""

from datetime import date, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_ext.job.seeds import generator
from nemo_ext.rl.worlds.world import Database, Row, Text, ToolError, World, one_of, paged, world_environment

TODAY = date(2025, 6, 18)

NAMES = (
    *("Anna Keller", "Boris Ivanov", "Chiara Conti", "David Moyo", "Emma Larsen", "Felix Braun", "Giulia Ferri"),
    *("Hana Suzuki", "Ivan Novak", "Julia Santos", "Karim Aziz", "Lena Fischer", "Marco Greco", "Nadia Rahman"),
    *("Oscar Nilsson", "Priya Nair", "Rafael Ortega", "Sara Cohen", "Tomas Dvorak", "Yara Haddad"),
)
STREETS = ("Mill Lane", "Station Road", "Park Avenue", "River Street", "Church Hill", "Garden Row", "Harbour Way")
MERCHANTS = (
    *("Bluebird Air", "City Market", "Corner Books", "Electra Store", "Fresh Bakery", "Grand Hotel", "Metro Tickets"),
    *("Night Cinema", "Orchid Spa", "Quick Fuel", "Sunny Toys", "Video Stream"),
)

Id = Annotated[str, Field(max_length=40)]
Amount = Annotated[float, Field(description="in euros", gt=0, le=1_000_000)]
Reason = Literal["not made by the customer", "charged twice", "goods not received", "wrong amount"]
Loss = Literal["lost", "stolen", "damaged"]


def find_customer(database: Database, name: Text) -> Any:
    """Customer numbers of a name."""
    wanted = " ".join(name.casefold().split())
    return [key for key, row in database.rows("customers") if row["name"].casefold() == wanted]


def verify_identity(
    database: Database, customer_id: Id, birth_date: Annotated[str, Field(description="YYYY-MM-DD", max_length=10)]
) -> Any:
    """Compare the date of birth that the customer has said with the one on file. Failed checks are recorded."""
    row = database.get("customers", customer_id)
    if row["birth_date"] != birth_date:
        # Recorded in the database, so that guessing dates makes a change that no task requests.
        database.update("customers", customer_id, failed_checks=row["failed_checks"] + 1)
        return "Error: this is not the date on file; the failed check was recorded"
    database.update("customers", customer_id, verified=True)
    return "verified"


def list_accounts(database: Database, customer_id: Id) -> Any:
    """A verified customer's accounts."""
    _verified(database, customer_id)
    return [
        {"id": key, "kind": row["kind"], "balance": row["balance"] / 100}
        for key, row in database.rows("accounts")
        if row["customer"] == customer_id
    ]


def list_cards(database: Database, customer_id: Id) -> Any:
    """A verified customer's cards."""
    _verified(database, customer_id)
    return [
        {"id": key, **row, "limit": row["limit"] / 100}
        for key, row in database.rows("cards")
        if database.get("accounts", row["account"])["customer"] == customer_id
    ]


def list_transactions(
    database: Database, account_id: Id, page: Annotated[int, Field(description="from 1", ge=1, le=1000)] = 1
) -> Any:
    """The transactions of a verified customer's account, the latest first."""
    _own_account(database, account_id)
    found: list[Row] = [
        {"id": key, **row, "amount": row["amount"] / 100}
        for key, row in database.rows("transactions")
        if row["account"] == account_id
    ]
    found.sort(key=lambda row: (row["day"], row["id"]), reverse=True)
    return paged(found, page, 8)


def list_disputes(database: Database, customer_id: Id) -> Any:
    """A verified customer's disputes."""
    _verified(database, customer_id)
    return [
        {"id": key, **row}
        for key, row in database.rows("disputes")
        if _customer_of(database, database.get("transactions", row["transaction"])["account"]) == customer_id
    ]


def transfer(database: Database, from_account: Id, to_account: Id, amount: Amount) -> Any:
    """Move money from a verified customer's account to any account of this bank."""
    payer, payee = _own_account(database, from_account), database.get("accounts", to_account)
    cents = _cents(amount)
    if from_account == to_account:
        raise ToolError("both are the same account")
    if payer["balance"] < cents:
        raise ToolError(f"the balance is {payer['balance'] / 100}")
    database.update("accounts", from_account, balance=payer["balance"] - cents)
    database.update("accounts", to_account, balance=payee["balance"] + cents)
    for account, other, signed in ((from_account, to_account, -cents), (to_account, from_account, cents)):
        row = {"account": account, "day": TODAY.isoformat(), "merchant": f"transfer {other}", "amount": signed}
        database.insert("transactions", row, "transaction-")
    return "done"


def block_card(database: Database, card_id: Id, reason: Loss) -> Any:
    """Block a verified customer's card for good; a new one needs replace_card."""
    card = _own_card(database, card_id)
    if card["state"] not in ("active", "blocked by PIN"):
        raise ToolError(f"the card is {card['state']}")
    database.update("cards", card_id, state=f"blocked: {reason}")
    return f"blocked: {reason}"


def unblock_card(database: Database, card_id: Id) -> Any:
    """Unblock a card that was blocked by a wrong PIN."""
    card = _own_card(database, card_id)
    if card["state"] != "blocked by PIN":
        raise ToolError(f"the card is {card['state']}: only cards blocked by PIN can be unblocked")
    database.update("cards", card_id, state="active")
    return "active"


def replace_card(database: Database, card_id: Id) -> Any:
    """Send a new card for one that is blocked as lost, stolen or damaged."""
    card = _own_card(database, card_id)
    if not card["state"].startswith("blocked: "):
        raise ToolError(f"the card is {card['state']}: block it first")
    database.update("cards", card_id, state="replaced")
    row = {**card, "state": "sent", "number": "new"}
    return {"id": database.insert("cards", row, "card-")}


def set_card_limit(database: Database, card_id: Id, limit: Amount) -> Any:
    """Set the monthly limit of an active card, 10000 at most."""
    card, cents = _own_card(database, card_id), _cents(limit)
    if card["state"] != "active":
        raise ToolError(f"the card is {card['state']}")
    if cents > 10_000_00:
        raise ToolError("the limit is 10000 at most")
    database.update("cards", card_id, limit=cents)
    return "done"


def open_dispute(database: Database, transaction_id: Id, reason: Reason) -> Any:
    """Dispute a card payment of a verified customer."""
    payment = database.get("transactions", transaction_id)
    _own_account(database, payment["account"])
    if payment["amount"] >= 0 or payment["merchant"].startswith("transfer"):
        raise ToolError("only card payments can be disputed")
    if any(row["transaction"] == transaction_id and row["state"] == "open" for _, row in database.rows("disputes")):
        raise ToolError("this payment is disputed already")
    row = {"transaction": transaction_id, "reason": reason, "state": "open"}
    return {"id": database.insert("disputes", row, "dispute-")}


def withdraw_dispute(database: Database, dispute_id: Id) -> Any:
    """Withdraw an open dispute of a verified customer."""
    dispute = database.get("disputes", dispute_id)
    _own_account(database, database.get("transactions", dispute["transaction"])["account"])
    if dispute["state"] != "open":
        raise ToolError(f"the dispute is {dispute['state']}")
    database.update("disputes", dispute_id, state="withdrawn")
    return "withdrawn"


def update_address(database: Database, customer_id: Id, address: Text) -> Any:
    """Change a verified customer's postal address."""
    _verified(database, customer_id)
    database.update("customers", customer_id, address=address)
    return "done"


def build(seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Build the tables for a seed; return a mapping from their names to mappings from ids to rows."""
    random = generator(seed, "bank")

    def number(low: int, high: int) -> int:
        return int(random.integers(low, high))

    tables: dict[str, dict[str, dict[str, Any]]] = {
        name: {} for name in ("customers", "accounts", "cards", "transactions", "disputes")
    }
    for n, name in enumerate(random.permutation(NAMES)[:8], start=1):
        customer = f"customer-{n}"
        tables["customers"][customer] = {
            "name": str(name),
            "birth_date": (date(1950, 1, 1) + timedelta(days=number(0, 365 * 50))).isoformat(),
            "address": f"{number(1, 90)} {one_of(random, STREETS)}",
            "verified": False,
            "failed_checks": 0,
        }
        for kind in ("checking", "savings"):
            account = f"account-{len(tables['accounts']) + 1}"
            tables["accounts"][account] = {"customer": customer, "kind": kind, "balance": number(500_00, 9000_00)}
            if kind == "savings":
                continue
            states = ["active", "blocked by PIN", "blocked: stolen"]
            for kind_of_card, state in zip(("debit", "credit", "virtual"), random.permutation(states), strict=True):
                card = {"account": account, "kind": kind_of_card, "state": str(state), "limit": number(5, 30) * 100_00}
                card["number"] = f"ends in {number(1000, 9999)}"
                tables["cards"][f"card-{len(tables['cards']) + 1}"] = card
            # One payment per merchant, so that the merchant's name identifies it.
            for merchant in random.permutation(MERCHANTS)[:6]:
                row: dict[str, Any] = {"account": account, "day": (TODAY - timedelta(days=number(1, 40))).isoformat()}
                row |= {"merchant": str(merchant), "amount": -number(5_00, 400_00)}
                tables["transactions"][f"transaction-{len(tables['transactions']) + 1}"] = row
            disputed = f"transaction-{len(tables['transactions'])}"
            row = {"transaction": disputed, "reason": "charged twice", "state": "open"}
            tables["disputes"][f"dispute-{len(tables['disputes']) + 1}"] = row
    return tables


WORLD = World(
    name="bank",
    build=build,
    tools=(
        *(find_customer, verify_identity, list_accounts, list_cards, list_transactions, list_disputes, transfer),
        *(block_card, unblock_card, replace_card, set_card_limit, open_dispute, withdraw_dispute, update_address),
    ),
    prompt=(
        f"You work at a bank's service desk and talk with a customer. It is {TODAY.isoformat()}. Verify who it is by "
        "the date of birth before anything else: ask for it, never guess. Then do what the customer asks for with the "
        "tools, and nothing else. A card blocked as stolen, lost or damaged is never unblocked but replaced."
    ),
)


environment = partial(world_environment, WORLD, max_turns=5, style="any")
"""Creates the environment `bank`, with five turns as in Domyn-Small, section 4.4."""


def _verified(database: Database, customer_id: str) -> None:
    if not database.get("customers", customer_id)["verified"]:
        raise ToolError("the customer is not verified: ask for the date of birth")


def _customer_of(database: Database, account_id: str) -> str:
    return str(database.get("accounts", account_id)["customer"])


def _own_account(database: Database, account_id: str) -> Row:
    _verified(database, _customer_of(database, account_id))
    return database.get("accounts", account_id)


def _own_card(database: Database, card_id: str) -> Row:
    card = database.get("cards", card_id)
    _own_account(database, card["account"])
    return card


def _cents(amount: float) -> int:
    cents = round(amount * 100)
    if cents < 1 or abs(cents - amount * 100) > 1e-6 * max(1, cents):
        raise ToolError("an amount may have at most two decimals")
    return cents
