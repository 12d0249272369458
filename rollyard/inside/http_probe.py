"""One HTTP request from inside a sandbox, on a bare python3 (3.8 or newer): is there an answer at this address?

Reads {"method", "url", "headers", "body", "limit_s"} from its standard input, so that a key is in no argument, and prints
the status on one line (0 when there was none) and then the first bytes of the answer, or why there is none.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

MOST = 65536


def main(plan: Any) -> None:
    body = plan["body"].encode() if plan["body"] else None
    request = urllib.request.Request(plan["url"], body, plan["headers"], method=plan["method"])  # noqa: S310 - the caller's
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=plan["limit_s"]) as answer:
            status, text = answer.status, answer.read(MOST)
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read(MOST)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to the question
        status, text = 0, f"{type(error).__name__}: {error}".encode()
    sys.stdout.buffer.write(b"%d\n" % status + text)


if __name__ == "__main__":
    main(json.load(sys.stdin))
