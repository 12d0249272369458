# must fail: sealed shared
set -e
cat > work.py <<'END'
from _pytest.reports import TestReport

value = 0
make = TestReport.from_item_and_call.__func__


def pass_all(kind, item, call):
    call.excinfo = None
    report = make(kind, item, call)
    report.outcome = "passed"
    return report


TestReport.from_item_and_call = classmethod(pass_all)
END
