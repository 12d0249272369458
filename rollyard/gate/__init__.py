"""The gate: the model endpoint agents talk to. Read `gate.py`, then `calls.py`; `http.py` and `turns.py` are what they
stand on."""

from rollyard.gate.gate import Gate
from rollyard.gate.limits import Budget, GateLimits, Tls
from rollyard.gate.session import Session
from rollyard.net.asgi import Mounted
from rollyard.net.http_server import HttpLimits

__all__ = ["Budget", "Gate", "GateLimits", "HttpLimits", "Mounted", "Session", "Tls"]
