"""How far a pull is, on a terminal: one bar, gone when it is over."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from rollyard.images.pull import OnProgress, PullProgress


@contextlib.contextmanager
def show_progress(image: str, *, shown: bool) -> Generator[OnProgress | None]:
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[layers]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(image[-28:], total=None, layers="")

        def tell(now: PullProgress) -> None:
            bars.update(
                bar, completed=now.bytes, total=now.total_bytes, layers=f"{now.layers}/{now.total_layers} layers"
            )

        yield tell
