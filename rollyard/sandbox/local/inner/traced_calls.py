"""Which system calls name files, and in which of their arguments: what a `tracer` has to see.

`paths` are arguments that point to a path, `links` the one that is the text of a new link. Of `results` the kernel writes a path
into the argument that is named. Each table has the numbers of one architecture.
"""

from __future__ import annotations

from typing import NamedTuple


class CallTable(NamedTuple):
    paths: dict[int, tuple[int, ...]]
    links: dict[int, int]
    results: dict[int, int]
    execs: dict[int, int]
    sockets: frozenset[int]
    connect: int
    from_cwd: tuple[int, ...]  # they take a directory first, and a path below it
    arguments: tuple[int, ...]  # where the registers of a process keep them
    number: int
    result: int
    stack: int
    registers: int

    @property
    def numbers(self) -> list[int]:
        return sorted({*self.paths, *self.links, *self.results, *self.execs, *self.sockets} - set(self.from_cwd))


_FIRST_X86 = (
    2, 4, 6, 21, 76, 80, 83, 84, 85, 87, 89, 90, 92, 94, 132, 133, 137,
    188, 189, 191, 192, 194, 195, 197, 198, 235,
)  # fmt: skip
_BELOW_X86 = (257, 258, 259, 260, 261, 262, 263, 268, 269, 280, 303, 332)
_BELOW_ANY = (437, 439, 452)  # openat2 faccessat2 fchmodat2
_FIRST_ARM = (5, 6, 8, 9, 11, 12, 14, 15, 43, 45, 49)
_BELOW_ARM = (33, 34, 35, 48, 53, 54, 56, 79, 88, 264, 291)

TABLES = {
    "x86_64": CallTable(
        paths={
            **dict.fromkeys(_FIRST_X86, (0,)),
            **dict.fromkeys((254, 267, *_BELOW_X86, *_BELOW_ANY), (1,)),
            **dict.fromkeys((82, 86), (0, 1)),
            **dict.fromkeys((264, 265, 316), (1, 3)),
            88: (1,),
            266: (2,),
        },
        links={88: 0, 266: 0},
        results={79: 0, 89: 1, 267: 2},
        execs={59: 0, 322: 1},
        sockets=frozenset({42, 49}),
        connect=42,
        from_cwd=(*_BELOW_X86, *_BELOW_ANY),
        arguments=(14, 13, 12, 7, 9, 8),
        number=15,
        result=10,
        stack=19,
        registers=27,
    ),
    "aarch64": CallTable(
        paths={
            **dict.fromkeys(_FIRST_ARM, (0,)),
            **dict.fromkeys((27, 78, *_BELOW_ARM, *_BELOW_ANY), (1,)),
            **dict.fromkeys((37, 38, 276), (1, 3)),
            36: (2,),
        },
        links={36: 0},
        results={17: 0, 78: 2},
        execs={221: 0, 281: 1},
        sockets=frozenset({200, 203}),
        connect=203,
        from_cwd=(*_BELOW_ARM, *_BELOW_ANY),
        arguments=(0, 1, 2, 3, 4, 5),
        number=8,
        result=0,
        stack=31,
        registers=34,
    ),
}
