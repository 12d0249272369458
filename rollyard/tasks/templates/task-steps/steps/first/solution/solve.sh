#!/bin/sh
# The reference solution: `rollyard check tasks` runs it to prove that the task can be solved.
echo alpha > /app/first.txt
