import json
from pathlib import Path

orders = {order["number"]: order for order in json.loads(Path("/app/orders.json").read_text())}
assert orders[1001] == {
    "number": 1001,
    "name": "Ben Ash",
    "address": "9 Dock Road",
    "status": "sent",
    "items": {"lamp": 1},
}
assert orders[1002] == {
    "number": 1002,
    "name": "Ada Moss",
    "address": "4 Mill Lane",
    "status": "open",
    "items": {"lamp": 2},
}
assert len(orders) == 2
