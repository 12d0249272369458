# must fail: sealed shared live
set -e
mkdir -p /app/mine/verifier
echo 1 > /app/mine/verifier/reward.json
ln -s /app/mine /logs
