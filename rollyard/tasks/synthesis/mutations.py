"""Faults in Python source: small changes of a syntax tree, written as edits of the text, so that all else stays as it was.

A rule gets a node and yields edits. Annotations, docstrings and what is inside f-strings are left alone: they change nothing, or
have no place in the text.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "|",
}  # fmt: skip
_FEWEST_STATEMENTS = 2
_SMALL = 1000


class Edit(NamedTuple):
    """Bytes `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: bytes


class Mutation(NamedTuple):
    """One fault: `edit` of the file `path`, whose text is `original`. `function` is the innermost it lies in, or no name."""

    kind: str
    path: str
    function: str
    original: str
    edit: Edit

    @property
    def faulty(self) -> str:
        data = self.original.encode()
        return (data[: self.edit.start] + self.edit.text + data[self.edit.end :]).decode()

    @property
    def name(self) -> str:
        """The same fault has the same name."""
        text = "\0".join((self.kind, self.path, self.original, repr(self.edit)))
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def repair(self) -> str:
        """The patch that takes the fault out."""
        before, after = (list(io.StringIO(text, newline="\n")) for text in (self.faulty, self.original))
        lines = difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def is_sound(self) -> bool:
        """Whether it is still Python, and means something else."""
        try:
            return ast.dump(ast.parse(self.faulty)) != ast.dump(ast.parse(self.original))
        except (SyntaxError, ValueError):
            return False


class _Text:
    """A file's bytes, and where in them each node lies."""

    def __init__(self, source: str, tree: ast.AST) -> None:
        self.data = source.encode()
        blocks = [block for node in ast.walk(tree) for _, block in ast.iter_fields(node) if isinstance(block, list)]
        self._alone = {id(block[0]) for block in blocks if len(block) == 1}
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # pyright: ignore[reportAttributeAccessIssue] - statements and expressions have them
        return self._starts[place[0] - 1] + place[1], self._starts[place[2] - 1] + place[3]

    def of(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.data[start:end]

    def put(self, node: ast.AST, text: bytes) -> Edit:
        return Edit(*self.span(node), text)

    def remove(self, node: ast.stmt) -> Edit:
        """Its lines, or `pass` where a block would be empty or the lines are not its own."""
        start, end = self.span(node)
        first = self.data.rfind(b"\n", 0, start) + 1
        last = self.data.find(b"\n", end) + 1 or len(self.data)
        own = not self.data[first:start].strip() and not self.data[end:last].strip()
        return Edit(first, last, b"") if own and id(node) not in self._alone else self.put(node, b"pass")


def _change_comparison(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        yield _edit_between(text, node.left, _COMPARISONS[type(node.ops[0])], node.comparators[0])


def _change_boolean(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        yield _edit_between(text, node.values[0], other, node.values[1])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text.put(node, b"(" + text.of(node.operand) + b")")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield text.put(node, str(not node.value).encode())


def _change_arithmetic(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, (ast.BinOp, ast.AugAssign)) or type(node.op) not in _ARITHMETIC:
        return
    left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not (_is_text(left) or _is_text(right)):
        sign = _ARITHMETIC[type(node.op)]
        yield _edit_between(text, left, sign if isinstance(node, ast.BinOp) else f"{sign}=", right)


def _be_off_by_one(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < _SMALL:
        for other in (node.value + 1, node.value - 1):
            yield text.put(node, str(other).encode() if other >= 0 else f"({other})".encode())


def _remove_branch(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.If) or not text.of(node).startswith(b"if"):  # an elif is a part of another
        return
    if not node.orelse:
        yield text.remove(node)
    elif not isinstance(node.orelse[0], ast.If):
        start, end = text.span(node.body[-1])[1], text.span(node)[1]
        yield Edit(start, end, b"")


def _remove_body(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    body = node.body[1:] if _is_text(getattr(node.body[0], "value", None)) else node.body
    if len(body) >= _FEWEST_STATEMENTS or (
        body and isinstance(body[0], (ast.If, ast.For, ast.While, ast.With, ast.Try))
    ):
        yield Edit(text.span(body[0])[0], text.span(body[-1])[1], b"raise NotImplementedError")


def _swap_arguments(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second = node.args[:2]
        start, end = text.span(first)[0], text.span(second)[1]
        between = text.data[text.span(first)[1] : text.span(second)[0]]
        yield Edit(start, end, text.of(second) + between + text.of(first))


def _remove_statement(text: _Text, node: ast.AST) -> Iterator[Edit]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise)) and (call or not isinstance(node, ast.Expr)):
        yield text.remove(node)


def _lose_result(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield text.put(node.value, b"None")


def _change_loop(text: _Text, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, (ast.Break, ast.Continue)):
        yield text.put(node, b"continue" if isinstance(node, ast.Break) else b"break")


KINDS: dict[str, Callable[[_Text, ast.AST], Iterator[Edit]]] = {
    "comparison": _change_comparison,
    "boolean": _change_boolean,
    "arithmetic": _change_arithmetic,
    "off-by-one": _be_off_by_one,
    "removed-branch": _remove_branch,
    "removed-body": _remove_body,
    "swapped-arguments": _swap_arguments,
    "removed-statement": _remove_statement,
    "lost-result": _lose_result,
    "loop": _change_loop,
}


def find_mutations(path: str, source: str, kinds: Iterable[str]) -> Iterator[Mutation]:
    """Every change of these kinds that the file has room for, in the order of its text. Not each of them `is_sound`."""
    tree, seen = ast.parse(source), set[Edit]()
    text, rules = _Text(source, tree), [(kind, KINDS[kind]) for kind in kinds]
    for node, function in _walk(tree, ""):
        for kind, rule in rules:
            for edit in rule(text, node):
                if edit not in seen:
                    seen.add(edit)
                    yield Mutation(kind, path, function, source, edit)


def _walk(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that may be changed, each with the function it lies in."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or _is_guard(child):
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{function}.{child.name}" if function else child.name
                yield child, inner
                yield from _walk(child, inner)
            else:
                yield child, function
                yield from _walk(child, function)


def _is_guard(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` and `if __name__ == "__main__":`, which tests do not reach."""
    return isinstance(node, ast.If) and any(
        isinstance(part, (ast.Name, ast.Attribute))
        and getattr(part, "id", getattr(part, "attr", "")) in ("TYPE_CHECKING", "__name__")
        for part in ast.walk(node.test)
    )


def _edit_between(text: _Text, left: ast.AST, sign: str, right: ast.AST) -> Edit:
    """What stands between two operands, with their brackets kept, as another operator."""
    start, end = text.span(left)[1], text.span(right)[0]
    closing = text.data[start:end].count(b")")
    opening = text.data[start:end].count(b"(")
    return Edit(start, end, b")" * closing + f" {sign} ".encode() + b"(" * opening)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
