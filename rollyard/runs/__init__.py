"""Where the rooms are wired together: one rollout (`rollout.py`), one with no set-up (`once.py`), many (`run.py`).

Many are done by workers (`worker.py`) that an executor starts in this process or on a cluster (`executor.py`)."""
