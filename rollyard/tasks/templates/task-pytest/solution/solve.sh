#!/bin/sh
# The reference solution: `rollyard check tasks` runs it to prove that the task can be solved.
printf 'def words(text):\n    return len(text.split())\n' > /app/counting.py
