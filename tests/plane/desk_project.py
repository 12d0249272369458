"""A help desk with a database, as an environment of the hub: tools for the agent, `reset` for the trainer."""

import sqlite3
from pathlib import Path

from plain_env import function, tool

FILE = Path("/env/desk.db")


def asked(sql, *args):
    with sqlite3.connect(FILE) as database:
        return database.execute(sql, args).fetchall()


@function
def reset(seed: int = 0) -> bool:
    FILE.unlink(missing_ok=True)
    asked("CREATE TABLE tickets (id INTEGER PRIMARY KEY, title TEXT, state TEXT)")
    asked("INSERT INTO tickets VALUES (1, 'printer', 'open'), (2, ?, 'open')", f"seed {seed}")
    return True


@tool
def close_ticket(ticket_id: int) -> dict:
    """Close a ticket."""
    asked("UPDATE tickets SET state = 'closed' WHERE id = ?", ticket_id)
    return {"closed": ticket_id}
