#!/bin/sh
cd /app && python3 - <<'END'
from durations import seconds

total, invalid = 0, []
for line in open("jobs.txt"):
    name, _, text = line.strip().partition(" ")
    try:
        total += seconds(text)
    except ValueError:
        invalid.append(name)
open("total.txt", "w").write(f"{total}\n")
open("invalid.txt", "w").write("\n".join(invalid) + "\n")
END
