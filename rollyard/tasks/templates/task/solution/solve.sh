#!/bin/sh
# The reference solution: `rollyard check tasks` runs it to prove that the task can be solved.
sed -i 's/World/Rollyard/' /app/greeting.txt
