# must fail: sealed
set -e
echo 'echo 1 > /logs/verifier/reward.json' > /etc/profile
echo '{"answer": 42}' > answer.json
