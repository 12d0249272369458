"""Which tests of a task load the agent's code into their own process, where it can do what the tests can.

Read off the files, nothing is run: an import of a module that the instruction, the environment or the solution names, a path of
the working directory put on `sys.path`, a file of it executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollyard.core.task import Task, VerifierSpec

_PYTHON_FILE = re.compile(r"\b([A-Za-z_]\w*)\.py\b")
_LOADERS = {"exec", "eval", "run_path", "spec_from_file_location", "exec_module", "import_module", "__import__"}


def find_agent_imports(task: Task, spec: VerifierSpec) -> Iterator[tuple[str, str]]:
    """Pairs of a test file and what it does."""
    if spec.kind == "pytest" and spec.options.get("pythonpath"):
        yield "verifier", f"options.pythonpath = {spec.options['pythonpath']!r}"
    names, workdir = _module_names(task), (task.workdir or "/app").rstrip("/")
    for directory in spec.tests:
        for path in sorted(Path(directory).rglob("*.py")):
            own = {file.stem for file in path.parent.glob("*.py")}
            try:
                tree = ast.parse(path.read_text(errors="replace"))
            except (SyntaxError, ValueError):
                continue
            for what in _find(tree, names - own, workdir):
                yield str(path.relative_to(Path(task.source))) if task.source else path.name, what


def _module_names(task: Task) -> set[str]:
    texts = [task.instruction, *(step.instruction for step in task.steps)]
    names = {match[1] for text in texts for match in _PYTHON_FILE.finditer(text)}
    names |= {Path(file.path).stem for file in task.files if file.path.endswith(".py")}
    if task.build is not None:
        names |= {path.stem for path in Path(task.build).rglob("*.py")}
    return names


def _find(tree: ast.AST, names: set[str], workdir: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module or ""] if not node.level else []
        else:
            found = []
            if isinstance(node, ast.Call) and (said := _loads(node, workdir)) is not None:
                yield f"line {node.lineno}: {said}"
        for name in found:
            if name.partition(".")[0] in names:
                yield f"line {node.lineno}: import of {name}"  # pyright: ignore[reportAttributeAccessIssue]


def _loads(node: ast.Call, workdir: str) -> str | None:
    text = ast.unparse(node)
    name = ast.unparse(node.func).rpartition(".")[2]
    if workdir not in text:
        return None
    if "sys.path" in text:
        return f"{workdir} on sys.path"
    return f"{name} of a file in {workdir}" if name in _LOADERS else None
