"""Who answers a call: another model server (`upstream`, `tokens`), the trainer (`Queue`), a script, a recording.

Read `queue.py` for the trainer's side, `upstream_policy.py` for a relayed one; `evidence.py` says what a reply proves. Names are
imported on first use (a queue needs no HTTP client), and no module is called like one of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.policy.connection import Timeouts as Timeouts
    from rollyard.policy.held_call import HeldCall as HeldCall
    from rollyard.policy.passthrough_policy import passthrough as passthrough
    from rollyard.policy.queue import Queue as Queue
    from rollyard.policy.queue import QueueSession as QueueSession
    from rollyard.policy.reference import PolicyText as PolicyText
    from rollyard.policy.reference import parse as parse
    from rollyard.policy.replay_policy import replay as replay
    from rollyard.policy.scripted_policy import scripted as scripted
    from rollyard.policy.tokens_policy import tokens as tokens
    from rollyard.policy.upstream_policy import upstream as upstream

# public name -> module that holds it
_NAMES = {
    "HeldCall": "held_call",
    "PolicyText": "reference",
    "Queue": "queue",
    "QueueSession": "queue",
    "Timeouts": "connection",
    "parse": "reference",
    "passthrough": "passthrough_policy",
    "replay": "replay_policy",
    "scripted": "scripted_policy",
    "tokens": "tokens_policy",
    "upstream": "upstream_policy",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'rollyard.policy' has no attribute {name!r}")
    value = getattr(import_module(f"rollyard.policy.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_NAMES)
