# must fail: sealed shared
set -e
printf '[pytest]\naddopts = -p evil\npythonpath = /app\n' | tee pytest.ini /pytest.ini > tox.ini
cat > evil.py <<'END'
def pytest_collection_modifyitems(items):
    items.clear()

def pytest_sessionfinish(session):
    session.exitstatus = 0
END
