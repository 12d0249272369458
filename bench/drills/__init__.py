"""Drills: runs and control planes whose parts are killed, stopped, filled up and cut off while they work. `make drills`."""
