"""Sandboxes as containers of a Docker or Podman engine, through its HTTP socket.

Reading order: `backend` (opens), `container` (what is asked of the engine), `keeper` (the first process inside), `box`,
`programs`, `files` and `job` (what callers hold), `routes` (listen and dial without a network), `engine` (the wire).
"""
