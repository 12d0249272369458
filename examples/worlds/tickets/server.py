"""A help desk as an environment: `server.py serve` runs its tools, `server.py reset` puts its database back."""

import os
import sqlite3
import sys
from pathlib import Path

from plain_mcp import ToolFailure, Tools

DATA = Path(__file__).parent / "data"
STATES = ("open", "waiting", "closed")
TICKETS = [
    ("Printer on floor 3 is on fire", "Ada", "open", 1),
    ("Cannot log in since Monday", "Grace", "open", 2),
    ("Please order more coffee", "Alan", "waiting", 3),
    ("Cannot log in, password expired", "Edsger", "open", 2),
    ("Screen flickers", "Barbara", "closed", 3),
]
tools = Tools("tickets")


def made(path, tickets):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE tickets (id INTEGER PRIMARY KEY, title TEXT NOT NULL, owner TEXT, state TEXT, priority INTEGER)"
        )
        database.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, ticket_id INTEGER, text TEXT)")
        database.executemany("INSERT INTO tickets (title, owner, state, priority) VALUES (?, ?, ?, ?)", tickets)


def reset():
    """The seed says where the list begins: the same tickets get other numbers."""
    turn = int(os.environ.get("ROLLYARD_SEED") or 0) % len(TICKETS)
    for name in ("seed", "current"):
        made(DATA / f"{name}.db", TICKETS[turn:] + TICKETS[:turn])


def asked(sql, *values):
    with sqlite3.connect(DATA / "current.db", timeout=10) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(sql, values)]


def one(ticket_id):
    found = asked("SELECT * FROM tickets WHERE id = ?", ticket_id)
    if not found:
        raise ToolFailure(f"there is no ticket {ticket_id}")
    return found[0]


@tools.tool
def list_tickets(state: str = "") -> list:
    """The tickets, all or those in one state (open, waiting, closed)."""
    if state:
        return asked("SELECT id, title, state FROM tickets WHERE state = ? ORDER BY id", state)
    return asked("SELECT id, title, state FROM tickets ORDER BY id")


@tools.tool
def get_ticket(ticket_id: int) -> dict:
    """One ticket with its notes."""
    return {
        **one(ticket_id),
        "notes": [n["text"] for n in asked("SELECT text FROM notes WHERE ticket_id = ?", ticket_id)],
    }


@tools.tool
def set_state(ticket_id: int, state: str) -> dict:
    """Change the state of a ticket."""
    if state not in STATES:
        raise ToolFailure(f"a state is one of {', '.join(STATES)}")
    one(ticket_id)
    asked("UPDATE tickets SET state = ? WHERE id = ?", state, ticket_id)
    return one(ticket_id)


@tools.tool
def add_note(ticket_id: int, text: str) -> str:
    """Write a note on a ticket."""
    one(ticket_id)
    asked("INSERT INTO notes (ticket_id, text) VALUES (?, ?)", ticket_id, text)
    return "noted"


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        reset()
    else:
        if not (DATA / "current.db").exists():
            reset()
        tools.serve(int(os.environ.get("PORT", "8700")))
