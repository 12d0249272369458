# must fail: sealed
set -e
for file in /usr/lib/python3*/json/__init__.py; do echo 'load = lambda f: {"answer": 42}' >> $file; done
echo fixed > state.txt
