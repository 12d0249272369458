#!/bin/sh
# For runners that only know test.sh; here the verifier `pytest` of task.toml runs the same tests.
python3 -m pytest -q -p no:cacheprovider /tests && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
