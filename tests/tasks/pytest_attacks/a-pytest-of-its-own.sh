# must fail: sealed shared
set -e
printf 'import sys\nsys.exit(0)\n' > pytest.py
mkdir -p _pytest
touch _pytest/__init__.py
