"""Sandboxes of E2B, and of servers that speak its protocol, through the published SDK (the extra `e2b`).

What the SDK does not give is made here: exact bytes, ends of whole process trees, jobs that outlive a connection, and ways in
and out of a sandbox without a network.
"""
