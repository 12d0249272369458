# must fail: sealed shared
set -e
printf 'import pytest\npytest.xfail("later")\n' > work.py
