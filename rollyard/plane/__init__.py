"""The control plane and the page: servers for people and machines over the rooms below."""
