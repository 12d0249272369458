#!/bin/sh
reward=0
if [ "$(cat /app/first.txt 2> /dev/null)" = "alpha" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
