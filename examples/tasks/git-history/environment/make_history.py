"""A repository with twenty commits, the same on every machine; one of the middle ones breaks `total`."""

import os
import subprocess
import sys
from pathlib import Path

RIGHT = "    return sum(prices) * (100 - discount) // 100\n"
WRONG = "    return sum(prices) - discount\n"
BREAKS_AT = 13


def source(number):
    notes = "".join(f"# note {n}\n" for n in range(number))
    body = RIGHT if number < BREAKS_AT else WRONG
    return f'{notes}\n\ndef total(prices, discount=0):\n    """The sum, less `discount` per cent."""\n{body}'


root = Path(sys.argv[1])
root.mkdir(parents=True)
who = {"NAME": "Shop", "EMAIL": "shop@example.com"}
for number in range(20):
    when = f"2024-01-{number + 1:02d}T12:00:00+00:00"
    env = {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in {**who, "DATE": when}.items()
    }
    env = {**os.environ, **env, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    if number == 0:
        subprocess.run(["git", "init", "-q", "-b", "main", "."], cwd=root, env=env, check=True)
    (root / "price.py").write_text(source(number))
    subprocess.run(["git", "add", "price.py"], cwd=root, env=env, check=True)
    subprocess.run(["git", "commit", "-q", "-m", f"Work on prices, part {number}"], cwd=root, env=env, check=True)
