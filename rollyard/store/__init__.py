"""The durable record: runs, attempts with leases, rollouts, calls, events, verdicts, bodies; and its exports.

Read `store.py` first, then `schema.py`. SQLAlchemy is used in this package only.
"""

from rollyard.store.store import Store

__all__ = ["Store"]
