#!/bin/sh
cd /app && python3 - <<'END'
text = open("ranges.py").read()
text = text.replace("merged = [ordered[0]]", "merged = ordered[:1]")
text = text.replace("if start < last_end:", "if start <= last_end + 1:")
text = text.replace("(last_start, end)", "(last_start, max(last_end, end))")
open("ranges.py", "w").write(text)
END
