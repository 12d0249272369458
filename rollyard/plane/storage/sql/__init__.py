"""The control plane's records in SQL: `hub.py` the environments, `instances.py` the instances and their quota, `keys.py`
who may ask, `sweep.py` the fenced sweep. Each function is one transaction's work; `SqlPlane` gives them the database."""

from rollyard.plane.storage.sql.store import SqlPlane

__all__ = ["SqlPlane"]
