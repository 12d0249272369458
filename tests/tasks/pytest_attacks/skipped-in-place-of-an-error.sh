# must fail: sealed shared
set -e
printf 'import builtins, pytest\nbuiltins.AssertionError = pytest.skip.Exception\n' > start.py
