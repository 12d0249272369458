# must fail: sealed shared live
set -e
mkdir -p /logs/verifier
echo 1 > /logs/verifier/reward.json
chmod 444 /logs/verifier/reward.json
chmod 555 /logs/verifier
