"""The embedded backend: namespaces, an overlay root and a supervisor, on the standard library and ctypes.

Reading order: `backend` (opens), `box` and `job` (what callers hold), `inner` (what runs on the other side).
"""
