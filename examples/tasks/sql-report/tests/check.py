"""The report is compared with one made from the same rows, without SQL."""

import collections
import csv
import runpy
import sqlite3
import sys
from pathlib import Path

sys.argv = ["make_database.py", "/tmp/expected.db"]
runpy.run_path("/tests/make_database.py")
database = sqlite3.connect("/tmp/expected.db")
paid = {o: c for o, c, s in database.execute("select id, customer_id, status from orders") if s == "paid"}
names = dict(database.execute("select id, name from customers"))
count, cents = collections.Counter(paid.values()), collections.Counter()
for order, quantity, unit in database.execute("select * from order_items"):
    if order in paid:
        cents[paid[order]] += quantity * unit
rows = sorted(((names[c], count[c], cents[c]) for c in count), key=lambda row: (-row[2], row[0]))
wanted = [["name", "orders", "revenue"], *([n, str(k), f"{v / 100:.2f}"] for n, k, v in rows)]
found = list(csv.reader(Path("/app/report.csv").read_text().splitlines()))
print(f"{len(wanted) - 1} rows wanted, {len(found) - 1} found, equal: {found == wanted}")
sys.exit(found != wanted)
