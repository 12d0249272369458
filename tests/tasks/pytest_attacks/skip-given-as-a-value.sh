# must fail: sealed shared
set -e
printf 'import pytest\n__getattr__ = pytest.skip\n' > work.py
