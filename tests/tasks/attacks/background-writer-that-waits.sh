# must fail: sealed shared
set -e
(setsid sh -c 'until [ -e /logs/verifier/reward.txt ]; do :; done; echo 1 > /logs/verifier/reward.json' \
    > /dev/null 2>&1 &)
