"""`Tree`: rollouts that branch. A run with one owes, for each rollout that ends, `width` children of it, `depth` levels deep.

Which attempt is whose child is arithmetic on the attempts' numbers, so nothing but the numbers is kept: a run that is resumed, or
done on several machines, finds the same tree.
"""

from __future__ import annotations

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.numbers import check_least


class Tree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A child at level n branches off its parent at the parent's call number `at * n` (0 is the first): each level keeps `at`
    calls more than the one above. A rollout that has no such call has no children."""

    width: int = 2
    depth: int = 1
    at: int = 1

    def __post_init__(self) -> None:
        check_least(1, width=self.width, depth=self.depth, at=self.at)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """`width=4,depth=2,at=3`; what is left out is the default."""
        pairs = [pair.partition("=") for pair in text.split(",")]
        if not all(sign for _, sign, _ in pairs):
            raise ConfigError(f"{text!r} describes no tree", hint="width=4,depth=2,at=3")
        try:
            return msgspec.convert({name: value for name, _, value in pairs}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{text!r} describes no tree: {error}", hint="width=4,depth=2,at=3") from error

    def parent_of(self, number: int, roots: int) -> int | None:
        """The number of the attempt that an attempt branches off, in a run with `roots` attempts at each task; None of a root."""
        return None if number < roots else (number - roots) // self.width

    def children_of(self, number: int, roots: int) -> range:
        """The numbers of an attempt's children, whatever its level."""
        first = roots + number * self.width
        return range(first, first + self.width)

    def level_of(self, number: int, roots: int) -> int:
        level, parent = 0, self.parent_of(number, roots)
        while parent is not None:
            level, parent = level + 1, self.parent_of(parent, roots)
        return level
