"""How agents on Node keep less memory while they wait for a model."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.core.agent import Launch

# A young generation of 1 MiB: a sixth less memory at a held call, for at most a tenth more CPU until the first. They are given on
# the command line, since a variable would also reach the programs that the agent runs.
FLAGS = ("--max-semi-space-size=1",)


def on_layer_node(launch: Launch, argv: Sequence[str], *flags: str) -> list[str]:
    """`argv` begins with a script. Out of a layer it runs on the layer's node; elsewhere its own first line finds one."""
    return [f"{launch.prefix}/bin/node", *flags, *FLAGS, *argv] if launch.prefix else list(argv)
