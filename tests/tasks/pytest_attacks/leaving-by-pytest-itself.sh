# must fail: sealed shared
set -e
printf 'import pytest\npytest.exit("done", returncode=0)\n' > work.py
