# must fail: sealed shared
set -e
cat > conftest.py <<'END'
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
END
cp conftest.py /conftest.py
