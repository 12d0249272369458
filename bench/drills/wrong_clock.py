"""`rollyard` on a machine whose clock is wrong: `python -m bench.drills.wrong_clock SECONDS serve plane ...`.

Only this process sees that time: what asks for it is given another answer before anything else is imported.
"""

from __future__ import annotations

import sys
import time

_real, _ahead = time.time, float(sys.argv.pop(1))
time.time = lambda: _real() + _ahead

from rollyard.cli.main import main  # noqa: E402 - the clock comes first

sys.exit(main())
