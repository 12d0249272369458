# must fail: sealed shared
set -e
cat > work.py <<'END'
import os, sys

CASES = "".join('<testcase classname="test_work" name="%s"/>' % name for name in ("test_it", "test_more"))
named = [word.partition("=")[2] for word in sys.argv if word.startswith("--junitxml=")]
for path in named + ["/logs/verifier/junit.xml"]:
    with open(path, "w") as file:
        file.write("<testsuites><testsuite>" + CASES + "</testsuite></testsuites>")
os.write(1, b"2 passed in 0.01s\n")
os._exit(0)
END
