"""How much memory a piece of work takes, whatever the tests before it left behind.

`tracemalloc` counts every allocation of the process. Garbage of earlier tests whose finalizers run in the middle (and print a
warning with a traceback, for which source files are read) would be counted too: it is collected first, and what is still alive is
kept out of the collector's sight until the work is done.
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def trace_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Inside it, the value given says how many bytes are held now, and how many were held at the most."""
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()
        gc.unfreeze()
