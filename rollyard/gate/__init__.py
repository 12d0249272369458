"""The gate: the model endpoint agents talk to. Read `gate.py`, then `calls.py`; `http.py` and `turns.py` are what they
stand on."""

from rollyard.gate.asgi import Mounted
from rollyard.gate.gate import Gate
from rollyard.gate.http import HttpLimits
from rollyard.gate.limits import Budget, GateLimits, Tls
from rollyard.gate.session import Session

__all__ = ["Budget", "Gate", "GateLimits", "HttpLimits", "Mounted", "Session", "Tls"]
