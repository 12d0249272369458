# must fail: sealed shared
set -e
cat > start.py <<'END'
import pytest

pytest.Function.runtest = lambda item: None
pytest.Item.runtest = lambda item: None
END
