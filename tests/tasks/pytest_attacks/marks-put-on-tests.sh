# must fail: sealed shared
set -e
cat > work.py <<'END'
import gc

import pytest

value = 0
for item in [thing for thing in gc.get_objects() if isinstance(thing, pytest.Item)]:
    item.add_marker(pytest.mark.xfail)
END
