"""Sandboxes of hosted services, one file for each: what differs between their SDKs. What is the same is in `remote`."""
