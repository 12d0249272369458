"""Each number in a process of its own, against a table written another way."""

import subprocess
import sys
from itertools import pairwise

VALUES = dict(zip("IVXLCDM", (1, 5, 10, 50, 100, 500, 1000), strict=True))


def value(roman):
    numbers = [VALUES[letter] for letter in roman] + [0]
    return sum(-a if a < b else a for a, b in pairwise(numbers))


def run(word):
    done = subprocess.run(["sh", "/app/out/roman.sh", word], capture_output=True, text=True, timeout=10)
    return done.returncode, done.stdout.strip()


SHORTEST = {
    1: "I",
    4: "IV",
    9: "IX",
    14: "XIV",
    40: "XL",
    90: "XC",
    400: "CD",
    944: "CMXLIV",
    1999: "MCMXCIX",
    3999: "MMMCMXCIX",
}
good = all(run(str(n)) == (0, text) and value(text) == n for n, text in SHORTEST.items())
bad = all(run(word) == (1, "") for word in ("0", "4000", "-1", "x", "", "1.5"))
print(f"numbers: {good}, refusals: {bad}")
sys.exit(not (good and bad))
