"""The one way out of a sandbox that may reach some hosts: a proxy on the host's side, with rules (`core/egress.py`).

`decide` turns a host and a port into an address to connect to, or a reason not to; `client_hello`, `http_request` and `dns`
read what programs send; `connection` carries bytes; `proxy` serves. TLS is never broken open: the name in its first message has
to be the one that was asked for.
"""
