"""Tasks: loading them (`taskset`, `harbor`, `rows`, `datasets`), building their images (`dockerfile`, `build`), judging what an
agent left (`grade`, `verifiers`). Start with `harbor/load.py`, then `grade.py`."""
