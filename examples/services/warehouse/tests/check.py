"""The order is worked out again from the server's own numbers."""

import runpy
import sys
from pathlib import Path

server = runpy.run_path("/tests/server.py")
found = [server["stock"](part) for part in sorted(server["PARTS"])]
wanted = [f"{s['part']} {s['minimum'] - s['in_stock']}" for s in found if s["in_stock"] < s["minimum"]]
order = Path("/app/order.txt").read_text().split("\n")
print(wanted, order)
sys.exit([line.strip() for line in order if line.strip()] != wanted)
