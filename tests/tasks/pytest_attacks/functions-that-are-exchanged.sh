# must fail: sealed shared
set -e
cat > start.py <<'END'
import pytest

setup = pytest.Function.setup


def exchange(item):
    setup(item)
    if type(item) is pytest.Function:
        item.obj = lambda **given: None


pytest.Function.setup = exchange
END
