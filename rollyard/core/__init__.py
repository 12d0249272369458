"""The nouns and the protocols. Read this package first: errors, limits, sandbox, message, call, trajectory, task, rollout,
agent, protocols. It stands on the standard library and msgspec and does no I/O."""
