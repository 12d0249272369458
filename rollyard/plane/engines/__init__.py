"""What makes instances: `protocol.py`; `backend.py` over any sandbox backend, `remote.py` over another plane, `standard.py`
and `arca.py` over HTTP APIs, `noop.py` over nothing; `choose.py` by name."""
