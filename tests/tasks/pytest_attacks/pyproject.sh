# must fail: sealed shared
set -e
printf '[tool.pytest.ini_options]\naddopts = "--co"\n' | tee pyproject.toml /pyproject.toml > /dev/null
