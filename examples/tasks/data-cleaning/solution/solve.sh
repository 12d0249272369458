#!/bin/sh
cd /app && python3 - <<'END'
import csv
import json
from datetime import datetime


def day(text):
    for form in ("%Y-%m-%d", "%d.%m.%Y", "%b %d %Y"):
        try:
            return datetime.strptime(text.strip(), form).date().isoformat()
        except ValueError:
            pass
    raise ValueError(text)


def value(text):
    text = text.strip()
    return None if text in ("", "-", "n/a") else float(text.replace(",", "."))


rows = {
    (line["sensor"].strip().upper(), day(line["day"]), value(line["value"]))
    for line in csv.DictReader(open("raw.csv"), delimiter=";")
    if line["sensor"].strip()
}
ordered = sorted(rows, key=lambda row: (row[0], row[1], row[2] is not None, row[2] or 0))
json.dump([dict(zip(("sensor", "day", "value"), row)) for row in ordered], open("clean.json", "w"))
END
