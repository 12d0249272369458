"""The three facts, counted from the pristine program."""

import runpy
import sys
from pathlib import Path

lines = list(runpy.run_path("/tests/simulate.py")["lines"]())
errors = sum(line.startswith("ERROR") for line in lines)
fatal = next(line for line in lines if line.startswith("FATAL")).split("id=")[1].split()[0]
latency = max(float(line.split("latency=")[1].split()[0]) for line in lines)
answer = Path("/app/answer.txt").read_text().split()
print(answer)
sys.exit(
    not (
        len(answer) == 3
        and answer[0] == str(errors)
        and answer[1].removeprefix("id=") == fatal
        and float(answer[2]) == latency
    )
)
