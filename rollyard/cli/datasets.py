"""`rollyard datasets list|add|show|run`: named datasets of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollyard.cli import run as run_verb
from rollyard.cli.printing import print_json, print_table
from rollyard.cli.verb_app import new_group

app = new_group()
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def datasets() -> None:
    """Keep datasets by name: `rollyard run NAME`, `rollyard eval` and `Taskset.load("NAME@VERSION")` take them."""


@app.command("list")
def list_datasets(json: Json = False) -> None:
    """List the datasets of this machine, and the forms that can be added with the place to get each."""
    from rollyard.core import registry
    from rollyard.tasks.adapters import GROUP, load_adapter
    from rollyard.tasks.dataset_registry import read_registry

    entries = read_registry()
    forms = {name: load_adapter(name) for name in registry.names(GROUP)}
    if json:
        shown = {name: {"about": form.about, "get": form.get, "needs": form.needs} for name, form in forms.items()}
        print_json({"datasets": entries, "adapters": shown})
        return
    if entries:
        rows = [[one.title, one.adapter, one.licence or "-", one.source] for one in entries]
        print_table(["dataset", "adapter", "licence", "source"], rows)
    else:
        typer.echo("no dataset is added yet; add one with `rollyard datasets add NAME --source PATH`")
    typer.echo("")
    print_table(["adapter", "reads"], [[name, f"{form.about}. Get it: {form.get}"] for name, form in forms.items()])


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="what to call it")],
    source: Annotated[
        str, typer.Option(help="folder, archive, .jsonl, .json, .csv or .parquet file, or git:PATH_OR_URL@COMMIT")
    ],
    version: Annotated[str, typer.Option(help="its version")] = "1",
    adapter: Annotated[str, typer.Option(help="how to read it; found out by looking where it is not given")] = "",
    licence: Annotated[str, typer.Option(help="what its authors allow, for people who read the list")] = "",
    digest: Annotated[str, typer.Option(help="sha256:... that its files must have")] = "",
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the adapter; may be repeated")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="in place of the one with this name and version")] = False,
    json: Json = False,
) -> None:
    """Put a dataset into the registry file, with the digest of its files. Nothing is downloaded but a git: source."""
    from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset, registry_file

    entry = DatasetEntry(
        name=name, version=version, source=source, adapter=adapter, licence=licence, digest=digest,
        options=_read_options(option or []),
    )  # fmt: skip
    added = add_dataset(entry, replace=replace)
    if json:
        print_json(added)
    else:
        typer.echo(f"{added.title} is read by {added.adapter!r}, kept in {registry_file()}")


def _read_options(texts: list[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts]
    if odd := [name for name, equals, _ in pairs if not equals]:
        raise typer.BadParameter(f"{odd[0]!r} is not NAME=VALUE", param_hint="--option")
    return {name: value for name, _, value in pairs}


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="NAME or NAME@VERSION")],
    limit: Annotated[int, typer.Option(min=0, help="how many tasks to list")] = 10,
    json: Json = False,
) -> None:
    """Show what a dataset is made of: its entry, its tasks, and the ones that cannot be read, with the reason."""
    from rollyard.core.errors import UnknownName
    from rollyard.tasks.dataset_registry import find_dataset, read_registry
    from rollyard.tasks.taskset import Taskset

    entry = find_dataset(name)
    if entry is None:
        raise UnknownName(
            "dataset",
            name,
            [one.title for one in read_registry()],
            hint="`rollyard datasets list` shows them and how to add one",
        )
    found = Taskset.load(entry.title)
    ids = [task.id for task in found[:limit]]
    if json:
        skipped = [one._asdict() for one in found.skipped]
        print_json({"entry": entry, "tasks": len(found), "first": ids, "skipped": skipped})
        return
    for key in ("version", "adapter", "source", "digest", "licence"):
        typer.echo(f"{key:9} {getattr(entry, key) or '-'}")
    typer.echo(f"{'needs':9} {', '.join(entry.needs) or '-'}")
    typer.echo(f"{'tasks':9} {len(found)}, {len(found.skipped)} cannot be read")
    for task_id in ids:
        typer.echo(f"  {task_id}")
    for folder, reason in found.skipped[:limit]:
        typer.echo(f"  left out: {Path(folder).name}: {reason}")


app.command("run")(run_verb.run)
