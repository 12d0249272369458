"""Harbor's task folders: `load.py` reads one, `write.py` writes one, `schema.py` is `task.toml`, `files.py` says which files
count."""
