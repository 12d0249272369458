# must fail: sealed shared
set -e
cat > start.py <<'END'
import gc

import pytest


class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if type(pyfuncitem) is pytest.Function else None


for config in [thing for thing in gc.get_objects() if isinstance(thing, pytest.Config)]:
    config.pluginmanager.register(Plugin())
END
