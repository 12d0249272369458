#!/bin/sh
cd /app && python3 - <<'END'
import hashlib

known = {hashlib.sha256(f"{n:04d}".encode()).hexdigest(): f"{n:04d}" for n in range(10000)}
lines = [known.get(line.strip(), "unknown") for line in open("tokens.txt")]
open("answer.txt", "w").write("\n".join(lines) + "\n")
END
