"""`rollyard check agent NAME`: the conformance suite on any agent."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer


def agent(
    name: Annotated[str, typer.Argument(help="agent name (pi, codex, ...), package.module:attribute, or a TOML file")],
    sandbox: Annotated[str, typer.Option(help="sandbox backend to run it in")] = "local",
    user: Annotated[str | None, typer.Option(help="user of the image to run it as")] = None,
    only: Annotated[str | None, typer.Option(help="only the cases of one letter (T: tools) or one id (W1)")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="include the cases that take minutes")] = False,
    figures: Annotated[
        bool, typer.Option("--figures", help="also measure a plain run: time, overhead, what the agent rewrites")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Run the conformance suite on an agent. Skipped cases give the reason. Exit code 3 when a case failed."""
    from rollyard.cli.printing import print_json
    from rollyard.testing.agent.verdict import AgentTotals, examine_agent

    async def run() -> AgentTotals:
        async with examine_agent(name, sandbox, user) as examination:
            async for outcome in examination.outcomes(only=only, slow=slow):
                if not json:
                    why = f"  ({outcome.why})" if outcome.why else ""
                    typer.echo(f"{outcome.result:8} {outcome.id:3} {outcome.title}{why}")
            if figures:
                await examination.measure()
            return examination.totals()

    totals = anyio.run(run)
    if json:
        print_json(totals)
    else:
        typer.echo(totals.line)
        if totals.figures is not None:
            seen = totals.figures
            typer.echo(
                f"wall {seen.wall_s:.2f} s, agent {seen.agent_s:.2f} s, overhead {seen.overhead_s * 1000:.0f} ms, "
                f"{seen.calls} calls, {seen.branches} branches, rewrites: {', '.join(seen.rewrites) or 'none'}"
            )
    if totals.failed:
        raise typer.Exit(3)
