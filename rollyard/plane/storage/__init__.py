"""Where the control plane keeps its records: `protocol.py` what is promised, `sql/` and `redis/` who promises it, `open.py`
which by its URL."""
