# must fail: sealed shared live
set -e
mkdir -p /app/mine /logs
echo 1 > /app/mine/reward.json
ln -s /app/mine /logs/verifier
