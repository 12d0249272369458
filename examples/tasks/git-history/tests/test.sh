#!/bin/sh
python3 -I /tests/check.py
case $? in
0) echo 1 > /logs/verifier/reward.txt ;;
1) echo 0 > /logs/verifier/reward.txt ;;
*) exit 2 ;; # it could not judge: no reward
esac
