"""The service itself is asked what it has now: it lives on while the tests run."""

import json
import sys
import urllib.request
import zlib
from pathlib import Path

stock = json.load(urllib.request.urlopen("http://inventory:8000/stock", timeout=10))
numbers = {part: zlib.crc32(part.encode()) for part in stock}
wanted = {part: max(number % 40, number // 40 % 40) for part, number in numbers.items()}
missing = sorted(part for part, number in numbers.items() if number % 40 < number // 40 % 40)
ordered = Path("/app/ordered.txt").read_text().split()
print(stock, wanted, ordered)
sys.exit(stock != wanted or len(stock) != 10 or ordered != missing)
