#!/bin/sh
cd /app
python3 simulate.py > /tmp/log
errors=$(grep -c '^ERROR' /tmp/log)
fatal=$(sed -n 's/^FATAL .*id=\([0-9a-f]*\) .*/\1/p' /tmp/log)
latency=$(awk '{ split($4, part, "="); if (part[2] + 0 > most + 0) most = part[2] } END { print most }' /tmp/log)
echo "$errors $fatal $latency" > answer.txt
