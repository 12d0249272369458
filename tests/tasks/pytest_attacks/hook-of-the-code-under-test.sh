# must fail: sealed shared
set -e
cat > work.py <<'END'
import gc

import pytest

value = 0


class Plugin:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        outcome.get_result().outcome = "passed"


for config in [thing for thing in gc.get_objects() if isinstance(thing, pytest.Config)]:
    config.pluginmanager.register(Plugin())
END
