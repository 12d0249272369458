"""The parser, in a process of its own so that it cannot touch this one."""

import json
import subprocess
import sys

CASES = {"1h30m": 5400, "45s": 45, "2d": 172800, "1d2h3m4s": 93784, "0s": 0}
BAD = ["", "1", "h", "1x", "1m1h", "1h1h", " 1h", "-1h", "1.5h"]
PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
from durations import seconds
out = []
for text in json.load(sys.stdin):
    try:
        out.append(seconds(text))
    except ValueError:
        out.append("ValueError")
print(json.dumps(out))
"""
texts = [*CASES, *BAD]
done = subprocess.run(
    [sys.executable, "-I", "-c", PROGRAM], input=json.dumps(texts), capture_output=True, text=True, timeout=20
)
print(done.stderr[-500:])
wanted = [*CASES.values(), *("ValueError" for _ in BAD)]
try:
    sys.exit(json.loads(done.stdout) != wanted)
except ValueError:
    sys.exit(1)
