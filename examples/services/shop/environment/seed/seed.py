"""What the shop has and should have, written to a volume once."""

import json
import sys
import zlib
from pathlib import Path

PARTS = ["axle", "bearing", "bolt", "chain", "gear", "nut", "pedal", "rim", "spoke", "washer"]
numbers = {part: zlib.crc32(part.encode()) for part in PARTS}
shared = Path(sys.argv[1])
(shared / "stock.json").write_text(json.dumps({part: number % 40 for part, number in numbers.items()}))
(shared / "minimum.json").write_text(json.dumps({part: number // 40 % 40 for part, number in numbers.items()}))
