"""The public API: every name resolves, and every type in a public signature can be imported by its user."""

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import rollyard

PACKAGES = [
    path.parent.name
    for path in sorted(Path(rollyard.__file__).parent.glob("*/__init__.py"))
    if path.parent.name != "cli"
]


def public_objects():
    for name in dir(rollyard):
        if not name.startswith("_"):
            value = getattr(rollyard, name)
            if not isinstance(value, types.ModuleType):
                yield f"rollyard.{name}", value
    for package in PACKAGES:
        module = importlib.import_module(f"rollyard.{package}")
        for name in getattr(module, "__all__", []):
            yield f"rollyard.{package}.{name}", getattr(module, name)


def signatures(label, value):
    """Functions of a public object: itself, or the public methods of a class and what makes one."""
    if inspect.isfunction(value):
        yield label, value
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
                yield f"{label}.{name}", function


def names_of(annotation):
    """The dotted names in an annotation's text, without strings inside Literal[...]."""
    tree = ast.parse(annotation, mode="eval")
    taken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in taken:
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def type_checking_imports(module):
    """What a module imports only for the type checker: such names are promises to users too."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


def resolve(name, module):
    head, *rest = name.split(".")
    if hasattr(module, head):
        value = getattr(module, head)
    elif hasattr(builtins, head):
        value = getattr(builtins, head)
    else:
        source, attribute = type_checking_imports(module)[head]
        value = getattr(importlib.import_module(source), attribute)
    for part in rest:
        value = getattr(value, part)
    return value


PUBLIC = dict(public_objects())
SIGNATURES = [entry for label, value in PUBLIC.items() for entry in signatures(label, value)]


@pytest.mark.parametrize(("label", "function"), SIGNATURES, ids=[label for label, _ in SIGNATURES])
def test_types_in_a_public_signature_can_be_imported(label, function):
    module = importlib.import_module(function.__module__)
    for annotation in function.__annotations__.values():
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "None")
        for name in names_of(text) if isinstance(annotation, str) else [text]:
            value = resolve(name, module)
            home = getattr(value, "__module__", "") or ""
            if isinstance(value, type) and home.startswith("rollyard."):
                public = not any(part.startswith("_") for part in (*home.split("."), value.__name__))
                assert public, f"{label} takes or returns {home}.{value.__name__}, which is private"
                assert getattr(importlib.import_module(home), value.__name__) is value


def test_every_public_name_resolves_and_is_listed():
    assert PUBLIC
    assert all(value is not None for value in PUBLIC.values())
    assert {"Run", "Task", "policy", "run_rollout"} <= set(dir(rollyard))


def test_the_root_holds_thirty_names_at_most():
    assert len(dir(rollyard)) <= 30


@pytest.mark.parametrize("package", ["rollyard", *(f"rollyard.{package}" for package in PACKAGES)])
def test_what_is_imported_on_first_use_resolves(package):
    module = importlib.import_module(package)
    for name in dir(module):
        assert name.startswith("__") or getattr(module, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rollyard.no_such_name


def test_importing_the_package_imports_none_of_its_rooms():
    code = "import sys, rollyard; print([name for name in sys.modules if name.startswith('rollyard.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rollyard.lazy']"


def test_type_hints_of_protocols_resolve():
    from rollyard.core import protocols

    for value in vars(protocols).values():
        if inspect.isclass(value) and value.__module__ == protocols.__name__:
            for method in vars(value).values():
                if inspect.isfunction(method):
                    typing.get_type_hints(method)


def test_a_misspelt_name_is_an_error_to_a_type_checker(tmp_path):
    program = tmp_path / "misspelt.py"
    program.write_text("import rollyard as ry\n\nry.Taskset\nry.policy.Queue\nry.Tasksett\nry.policy.Queu\n")
    told = subprocess.run(
        [Path(sys.executable).with_name("pyright"), "--pythonpath", sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert [line for line in told.stdout.splitlines() if "is not a known attribute" in line and ":5:" in line], (
        told.stdout
    )
    assert "Queu" in told.stdout and "2 errors" in told.stdout, told.stdout
