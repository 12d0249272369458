"""The graph of all calls of one rollout: pure values, no I/O, no clock.

Reading order: `lineage` (which recorded path a request's words continue), `attach` (what a call goes on from, before it is
answered; where it is placed, once it is), `fork_reason` (why a path forks), `graph` (nodes and their tokens), `call_index`
(the calls), `trajectory` (all of it together: `match` and `add`). Then what is read from it: `branch` (a path is one
training sequence), `samples` (rows for a trainer), `turns` (rows for people), `laws` (what must hold of every recording).
`body_cache` holds the request bodies that the next ones are stored as differences of.
"""
