# must fail: sealed shared live
set -e
mkdir -p /tests
echo 'load = lambda f: {"answer": 42}' > /tests/json.py
echo fixed > /app/state.txt
