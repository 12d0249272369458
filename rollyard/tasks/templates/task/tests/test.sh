#!/bin/sh
# Runs after the agent, from the working directory, in a fresh sandbox. The reward is what it writes here.
reward=0
if [ "$(cat /app/greeting.txt)" = "Hello, Rollyard!" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
