"""A small order desk: a web application for tasks that are done in a browser. Standard library only.

    python examples/webapp/app.py --port 8080 --db orders.db

Orders are kept in SQLite, so that a verifier can look at what really happened. `seed()` makes the same four orders each time.
"""

from __future__ import annotations

import argparse
import html
import sqlite3
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ORDERS = [
    (101, "Ada Lovelace", "2 x punched cards", "open"),
    (102, "Grace Hopper", "1 x moth trap", "open"),
    (103, "Alan Turing", "3 x paper tape", "open"),
    (104, "Edsger Dijkstra", "1 x shortest path", "shipped"),
]
STYLE = """
body { margin: 0; font: 16px/24px system-ui, sans-serif; color: #1c2330; background: #f4f6f9; }
header { height: 56px; padding: 0 32px; background: #1f3a5f; color: #fff; font: 600 20px/56px system-ui, sans-serif; }
main { width: 900px; margin: 24px 32px; }
.row { display: flex; align-items: center; height: 56px; margin-bottom: 8px; background: #fff; border-radius: 6px; }
.row span { width: 200px; padding-left: 16px; white-space: nowrap; overflow: hidden; }
.row .number { width: 72px; font-variant-numeric: tabular-nums; }
button { width: 140px; height: 36px; border: 0; border-radius: 4px; background: #2563a8; color: #fff; font: inherit; }
form.note { display: flex; gap: 8px; margin-top: 24px; }
form.note input { width: 420px; height: 36px; padding: 0 12px; border: 1px solid #9aa6b5; border-radius: 4px; font: inherit; }
"""


def seed(path: Path) -> None:
    """The same four orders, whatever was there."""
    with sqlite3.connect(path) as db:
        db.executescript(
            "DROP TABLE IF EXISTS orders; DROP TABLE IF EXISTS notes;"
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, goods TEXT, status TEXT);"
            "CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT);"
        )
        db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", ORDERS)
    db.close()


def page(db: sqlite3.Connection) -> str:
    rows = "".join(
        f'<div class="row"><span class="number">{number}</span><span>{html.escape(customer)}</span>'
        f"<span>{html.escape(goods)}</span><span>{html.escape(status)}</span>{_button(number, status)}</div>"
        for number, customer, goods, status in db.execute("SELECT * FROM orders ORDER BY id")
    )
    notes = "".join(f"<p>{html.escape(text)}</p>" for (text,) in db.execute("SELECT text FROM notes ORDER BY id"))
    fields = '<input name="text" placeholder="Note"><button>Add note</button>'
    form = f'<form class="note" method="post" action="note">{fields}</form>'
    return (
        f"<!doctype html><meta charset=utf-8><title>Orders</title><style>{STYLE}</style>"
        f"<header>Order desk</header><main>{rows}{form}{notes}</main>"
    )


def _button(number: int, status: str) -> str:
    if status != "open":
        return ""
    return f'<form method="post" action="ship"><input type="hidden" name="id" value="{number}"><button>Ship</button></form>'


class Desk(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], db: Path) -> None:
        self.db = db
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    server: Desk

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self._answer(200, "ok", "text/plain")
        elif path == "/":
            with sqlite3.connect(self.server.db) as db:
                self._answer(200, page(db), "text/html; charset=utf-8")
        else:
            self._answer(404, "there is no such page", "text/plain")

    def do_POST(self) -> None:
        size = min(int(self.headers.get("Content-Length") or 0), 64 * 1024)
        fields = {name: values[0] for name, values in parse_qs(self.rfile.read(size).decode()).items()}
        with sqlite3.connect(self.server.db) as db:
            if self.path == "/ship":
                db.execute("UPDATE orders SET status = 'shipped' WHERE id = ?", (fields.get("id"),))
            elif self.path == "/note" and fields.get("text"):
                db.execute("INSERT INTO notes (text) VALUES (?)", (fields["text"],))
        self.send_response(303)
        self.send_header("Location", "./")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: its caller reads only the ready line."""


def main() -> None:
    parser = argparse.ArgumentParser(description="a small order desk")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--db", type=Path, default=Path("orders.db"))
    chosen = parser.parse_args()
    seed(chosen.db)
    server = Desk(("127.0.0.1", chosen.port), chosen.db)
    print(f"order desk ready at http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
