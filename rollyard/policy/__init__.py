"""Who answers a call: another model server (`upstream`, `tokens`), the trainer (`Queue`), a script, a recording.

Read `queue.py` for the trainer's side, `upstream_policy.py` for a relayed one; `evidence.py` says what a reply proves. Names are
imported on first use (a queue needs no HTTP client), and no module is called like one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.lazy import attach

if TYPE_CHECKING:
    from rollyard.policy.connection import Timeouts as Timeouts
    from rollyard.policy.held_call import HeldCall as HeldCall
    from rollyard.policy.passthrough_policy import passthrough as passthrough
    from rollyard.policy.queue import Queue as Queue
    from rollyard.policy.queue import QueueSession as QueueSession
    from rollyard.policy.reference import PolicyText as PolicyText
    from rollyard.policy.reference import parse as parse
    from rollyard.policy.renderers.load import renderer as renderer
    from rollyard.policy.replay_policy import replay as replay
    from rollyard.policy.scripted_policy import scripted as scripted
    from rollyard.policy.tokens_policy import tokens as tokens
    from rollyard.policy.upstream_policy import upstream as upstream
else:
    __getattr__, __dir__ = attach(__name__)  # hidden from type checkers, to which a misspelt name is an error
