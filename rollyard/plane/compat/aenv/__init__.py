"""AEnvironment's API: the published `aenvironment` package and its command line drive the plane's hub and instances.

The package keeps only the host of its URL and expects two ports there: 8080 (`control.py`, `hub.py`) and 8081 (`data.py`, the way
into an instance). So the API has an address of its own, a spare loopback one by default.
"""
