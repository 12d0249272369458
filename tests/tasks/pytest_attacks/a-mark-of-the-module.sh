# must fail: sealed shared
set -e
cat > start.py <<'END'
import sys

import pytest

frame = sys._getframe()
while frame is not None:
    if frame.f_globals.get("__name__") == "test_work":
        frame.f_globals["pytestmark"] = pytest.mark.xfail
    frame = frame.f_back
END
