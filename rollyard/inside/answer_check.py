"""Whether two short texts say the same: `python3 -I answer_check.py GIVEN EXPECTED`. Case, spaces and a last full stop do not
count, and a number is equal to itself in any spelling (`1,000`, `1000.0`)."""

import re
import sys


def words(text):
    found = text.strip().rstrip(".").casefold().split()
    return [number(word) for word in found]


def number(word):
    plain = word.replace(",", "")
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", plain):
        return float(plain)
    return word


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)


if __name__ == "__main__":
    try:
        given = read(sys.argv[1])
    except OSError as error:
        sys.exit("there is no answer: %s" % error)
    expected = read(sys.argv[2])
    if words(given) != words(expected):
        sys.exit("the answer is %r" % given[:200])
