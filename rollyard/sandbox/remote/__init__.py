"""Sandboxes of providers whose SDK gives three things: run a line, put a file, get a file.

Everything else is made of these once, for all of them: exact bytes, ends of whole process trees, jobs that outlive a connection,
files with reasons, a relay without stdin, labels, leases, and an end that is found when no client is left. A provider is one file
in `sandbox/providers` with a `SandboxLink` and a `SandboxProvider`; it holds no retry and no loop of its own. One whose SDK also
streams programs gives a `StreamingLink`: jobs then have a stdin, and the relay goes over one program's pipes.
"""
