#!/bin/sh
cd /app && python3 - <<'END'
import json
import urllib.request
from pathlib import Path

URL = "http://inventory:8000"
minimum = json.loads(Path("/shared/minimum.json").read_text())
stock = json.load(urllib.request.urlopen(f"{URL}/stock"))
missing = {part: minimum[part] - count for part, count in sorted(stock.items()) if count < minimum[part]}
for part, count in missing.items():
    urllib.request.urlopen(f"{URL}/order", json.dumps({"part": part, "count": count}).encode())
Path("ordered.txt").write_text("".join(f"{part}\n" for part in missing))
END
