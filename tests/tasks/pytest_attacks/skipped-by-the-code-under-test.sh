# must fail: sealed shared
set -e
printf 'import unittest\nraise unittest.SkipTest("later")\n' > work.py
