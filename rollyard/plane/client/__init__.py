"""The caller's side: the client of a plane, environments out of its hub, folders pushed to it."""
