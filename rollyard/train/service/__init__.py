"""Rollouts as a service: `rollyard serve rollouts`. Jobs go in over HTTP, rows for a trainer come out, in any language."""
