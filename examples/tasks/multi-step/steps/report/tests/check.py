"""5400 + 45 + 172800 + 605 seconds; two lines are not durations."""

import sys

total = open("/app/total.txt").read().strip()
invalid = open("/app/invalid.txt").read().split()
print(total, invalid)
sys.exit(not (total == "178850" and invalid == ["report", "mail"]))
