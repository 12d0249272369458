"""5400 + 45 + 172800 + 605 seconds; two lines are not durations."""

import sys
from pathlib import Path

total = Path("/app/total.txt").read_text().strip()
invalid = Path("/app/invalid.txt").read_text().split()
print(total, invalid)
sys.exit(not (total == "178850" and invalid == ["report", "mail"]))
