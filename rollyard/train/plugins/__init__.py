"""What each trainer loads: one module per trainer, each importing its own trainer's package and no other.

All of them ask a server of rollouts (`rollyard serve rollouts`) through `ServedRollouts`: agents run beside that
server, wherever it is, and the trainer's process needs nothing of a sandbox.
"""
