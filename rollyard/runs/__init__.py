"""Where the rooms are wired together: one rollout (`rollout.py`), one with no set-up (`once.py`), many (`run.py`)."""
