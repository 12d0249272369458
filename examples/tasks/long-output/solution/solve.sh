#!/bin/sh
cd /app
python3 simulate.py > /tmp/log
errors=$(grep -c '^ERROR' /tmp/log)
fatal=$(sed -n 's/^FATAL .*id=\([0-9a-f]*\) .*/\1/p' /tmp/log)
latency=$(sed 's/.*latency=\([0-9.]*\).*/\1/' /tmp/log | sort -g | tail -1)
echo "$errors $fatal $latency" > answer.txt
