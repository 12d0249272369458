# must fail: sealed shared
set -e
cat > work.py <<'END'
exec(compile("import unittest\nclass Work:\n  @property\n  def value(self): raise unittest.SkipTest('later')", "<work>", "exec"))
import sys
sys.modules["work"] = Work()
END
