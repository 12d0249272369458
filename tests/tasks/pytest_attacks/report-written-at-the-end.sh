# must fail: sealed shared
set -e
cat > work.py <<'END'
import atexit, os, sys

value = 0
CASES = "".join('<testcase classname="test_work" name="%s"/>' % name for name in ("test_it", "test_more"))


def forge():
    named = [word.partition("=")[2] for word in sys.argv if word.startswith("--junitxml=")]
    for path in named + ["/logs/verifier/junit.xml"]:
        with open(path, "w") as file:
            file.write("<testsuites><testsuite>" + CASES + "</testsuite></testsuites>")
    os._exit(0)


atexit.register(forge)
END
