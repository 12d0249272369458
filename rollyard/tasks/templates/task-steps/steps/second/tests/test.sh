#!/bin/sh
reward=0
if [ "$(cat /app/first.txt)" = "$(printf 'alpha\nbeta')" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
