"""The command line's way in, also as `python -m rollyard`. Ctrl-C while modules are still being imported ends the process without
a trace; from then on `main` answers it."""

from __future__ import annotations

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a caller may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from rollyard.cli.main import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from rollyard.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
