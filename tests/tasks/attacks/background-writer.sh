# must fail: sealed shared
set -e
(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/r; mv /logs/r /logs/verifier/reward.json; done' \
    > /dev/null 2>&1 &)
sleep 0.1
