"""A plugin of pytest that tells another process how each test ended, at the moment it ends: `run_tests.py` reads what it says.

Code under test runs in pytest's own process. What it writes into a report, prints or does when the interpreter ends comes too
late here. When all tests are done, controls go through the same steps as the tests did: each raises an error, so that one which
is reported as passed shows that reports, hooks or assertions were changed. The last control is that what runs a test, functions
and hooks, is still what it was before the first line of the project's code. A test that is skipped or expected to fail by code
that is no test is reported as failed, and so is one that was collected and never ran. Every message has a key that the code under
test was not given; code that looks for the key, or for this plugin, can still lie. Runs on old Pythons, 2.7 too, with pytest 3
and later.

Honest tests do much to the process they share with this plugin: they patch `os` and `json`, close files they did not open, fork
and return. So what it needs is kept from before they are loaded, and controls run in a child, which leaves the project's hooks
as they were.
"""

import json
import os
import select
import shutil
import signal
import sys
import sysconfig
import tempfile
import types
import warnings

import _pytest.runner
import pytest

CHANNEL = KEY = ""  # a FIFO and the key of each message; `run_tests.py` writes both below
CONTROLS_S = 60.0  # for the child that runs the controls
_open = {}
_os = dict(
    (name, getattr(os, name))
    for name in ("_exit", "close", "fork", "fstat", "getpid", "kill", "open", "pipe", "read", "waitpid", "write")
)
_io = {"open": open}
_encode = json.JSONEncoder().encode
_due = set()  # tests that were collected and of which nothing was reported yet
_marks = {}  # of each test, when it was collected
_before = {}  # what ran tests before a conftest.py was loaded


def say(kind, *values):
    """A child that a test forked, and that came back into pytest, has nothing to say."""
    if not _open or _os["getpid"]() != _open["pid"]:
        return
    data = (_encode((KEY, kind, values)) + "\n").encode("ascii")
    while data:
        data = data[_os["write"](_find_channel(), data) :]


def _find_channel():
    """Opened again where a test closed it, or another file has its number since."""
    try:
        if _see_file() == _open["file"]:
            return _open["channel"]
    except OSError:
        pass
    _open["channel"] = _os["open"](CHANNEL, os.O_WRONLY)
    _open["file"] = _see_file()
    return _open["channel"]


def _see_file():
    found = _os["fstat"](_open["channel"])
    return found.st_dev, found.st_ino


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    _before.update(steps=_see_steps(), hooks=[hook.function for hook in _see_hooks(early_config)])


def pytest_configure(config):
    """Workers of xdist tell their results to the process that started them, which is the one that speaks here."""
    if not hasattr(config, "workerinput") and not hasattr(config, "slaveinput") and not _open:
        _open.update(pid=_os["getpid"](), channel=-1, file=None)
        say("start", str(getattr(config, "rootpath", None) or config.rootdir), os.getcwd())


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    excinfo = call.excinfo  # unittest's are replaced
    report = (yield).get_result()
    if report.outcome == "skipped" and not isinstance(item, Control) and _is_left_by_others(item, excinfo):
        report.left_by_others = True


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = (yield).get_result()
    if report.outcome == "skipped" and _is_left_by_others(collector, report.call.excinfo):
        report.left_by_others = True


def _is_left_by_others(item, excinfo):
    """Whether code that is neither a test nor a library skipped this one, or said that it is expected to fail."""
    if excinfo is None or not _is_leaving(excinfo.value):
        return not _is_marked(item)  # a mark makes a failure an expected one
    trace, last, foreign = excinfo.tb, None, False
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        path = os.path.realpath(frame.f_code.co_filename)
        if not path.startswith(LIBRARIES) and all(frame.f_globals is not known for known in IMPORTING):
            last = frame
        foreign = foreign or (path.startswith(LIBRARIES) and not path.startswith(RUNNING))
    if last is None:
        return not foreign and not _is_marked(item)
    place = os.path.realpath(last.f_code.co_filename)
    if os.path.basename(place) == "conftest.py":
        return False
    own = os.path.realpath(str(getattr(item, "path", None) or item.fspath))
    root = os.path.realpath(str(getattr(item.config, "rootpath", None) or item.config.rootdir))
    alone = __name__ == "__main__"  # started for tests that have a folder of their own
    tests = os.path.join(root, "") if alone else own
    if place != own and not place.startswith(tests):
        return True
    words = " ".join(last.f_code.co_names + last.f_code.co_varnames + last.f_code.co_freevars).lower()
    return not foreign and "skip" not in words and "xfail" not in words  # what it called was given to it


def _is_marked(item):
    """Whether the files of this test speak of such marks, and in the way that it got its own."""
    marks = list(item.iter_markers_with_node()) if hasattr(item, "iter_markers_with_node") else []
    marks = [(node, mark) for node, mark in marks if mark.name in ("skip", "skipif", "xfail")]
    manager = item.config.pluginmanager
    files = set(str(getattr(plugin, "__file__", "")) for plugin in manager.get_plugins() if _is_conftest(plugin))
    kinds = getattr(getattr(item, "cls", None), "__mro__", ())
    files.update(str(getattr(sys.modules.get(kind.__module__), "__file__", "")) for kind in kinds)
    files.add(str(getattr(item, "path", None) or item.fspath))
    known = _marks.get(item.nodeid, [mark for _, mark in marks])
    if any(all(mark is not one for one in known) for _, mark in marks):
        words = ("add_marker", "applymarker")  # since it was collected
    else:
        of_module = marks and all(isinstance(node, pytest.Module) for node, _ in marks)
        words = ("pytestmark",) if of_module else ("skip", "xfail", "expectedfailure")
        callers = [manager.hook.pytest_collection_modifyitems, manager.hook.pytest_itemcollected]
        files.update(str(getattr(one.plugin, "__file__", "")) for caller in callers for one in _list_hooks(caller))
    texts = [_read(file) for file in files if not os.path.realpath(file).startswith(RUNNING)]
    return any(word in text for text in texts for word in words)


def _is_conftest(plugin):
    return os.path.basename(str(getattr(plugin, "__file__", ""))) == "conftest.py"


def _read(file):
    try:
        with _io["open"](file, "rb") as source:
            return source.read().decode("utf-8", "replace").lower()
    except EnvironmentError:
        return ""


def _is_leaving(error):
    kinds = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    return isinstance(error, LEAVING) or ("unittest.case", "SkipTest") in kinds


def pytest_collection_finish(session):
    _due.update(item.nodeid for item in session.items)
    if hasattr(pytest.Item, "iter_markers"):
        _marks.update((item.nodeid, list(item.iter_markers())) for item in session.items)


def pytest_runtest_logreport(report):
    _due.discard(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        say_report(report, report.when)


def pytest_collectreport(report):
    if report.outcome == "failed" or hasattr(report, "left_by_others"):
        say_report(report, "collect")


def say_report(report, when):
    outcome = "failed" if hasattr(report, "left_by_others") else report.outcome
    say("test", report.nodeid, when, outcome, when != "collect" and hasattr(report, "wasxfail"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    if not _open or _os["getpid"]() != _open["pid"]:
        return
    if not session.config.option.collectonly:
        for node in sorted(_due):
            say("test", node, "call", "failed", False)
    if not _run_apart(session):
        _run_controls(session)
    say("control", len(CONTROLS), "failed" if _are_known(session) else "passed")
    say("end", int(exitstatus))


def _run_controls(session):
    for number, act in enumerate(CONTROLS):
        say("control", number, _run_control(session, act))


def _run_apart(session):
    """Whether the controls ran in a child: a project's hooks may count what runs, and fail for what failed."""
    try:
        reading, writing = _os["pipe"]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which the child does without
            child = _os["fork"]()
    except OSError:
        return False
    if not child:
        _open["pid"] = _os["getpid"]()
        try:
            _run_controls(session)
            _os["write"](writing, b"1")
        finally:
            _os["_exit"](0)
    _os["close"](writing)
    done = select.select([reading], [], [], CONTROLS_S)[0] and _os["read"](reading, 1) == b"1"
    _os["close"](reading)
    if not done:
        _os["kill"](child, signal.SIGKILL)
    try:
        _os["waitpid"](child, 0)
    except OSError:
        pass  # something of the project waits for every child
    return done


class Control(pytest.Function):
    """It is called as functions are."""

    funcargs = {}

    class _fixtureinfo:
        argnames = ()

    def __init__(self, name, parent, **given):
        super(pytest.Function, self).__init__(name, parent, **given)

    def setup(self):
        pass

    def repr_failure(self, excinfo, *style):
        return "a control"

    def reportinfo(self):
        return getattr(self, "path", None) or self.fspath, 0, self.name


def _run_control(session, act):
    """How it is reported, or skipped by a hook of the project; nothing else hears of it."""
    name = "test_" + act.__name__
    item = Control.from_parent(session, name=name) if hasattr(Control, "from_parent") else Control(name, session)
    left = []

    def run():
        try:
            act()
        except LEAVING:
            left.append(name)  # in place of an error
            raise

    item.obj = run
    try:
        outcomes = [
            (report.when, report.outcome) for report in _pytest.runner.runtestprotocol(item, log=False, nextitem=None)
        ]
    except Exception:  # noqa: BLE001 - a hook of the project that knows functions alone; an error is no pass
        return "failed"
    passed = ("call", "passed") in outcomes and "failed" not in dict(outcomes).values()
    return "passed" if passed or left else "failed"


def plain():
    raise AssertionError("a control")


def raises():
    with pytest.raises(ValueError):
        pass


def equal():
    import unittest

    unittest.TestCase("run").assertEqual(1, 2)


def true():
    import unittest

    unittest.TestCase("run").assertTrue(False)


def raises_in_unittest():
    import unittest

    with unittest.TestCase("run").assertRaises(ValueError):
        pass


def rewritten():
    """An assertion in a file of tests that is loaded now."""
    place = tempfile.mkdtemp()
    name = "test_" + os.path.basename(place).replace("-", "_")
    try:
        with open(os.path.join(place, name + ".py"), "w") as file:
            file.write("one = 1\nassert one == 2\n" if __debug__ else "raise AssertionError")
        sys.path.insert(0, place)
        __import__(name)
    finally:
        if place in sys.path:
            sys.path.remove(place)
        sys.modules.pop(name, None)
        shutil.rmtree(place, ignore_errors=True)


STEPS = {  # modules that take a test from its function to its report
    "_pytest": ("main", "nodes", "outcomes", "python", "reports", "runner", "skipping", "unittest"),
    "pluggy": ("_callers", "_execution", "_hooks", "_result", "callers", "hooks"),
    "unittest": ("case",),
}
STEERING = (
    "pytest_runtest_",
    "pytest_pyfunc_call",
    "pytest_collection_",
    "pytest_item",
    "pytest_make_",
    "pytest_report_",
)


def _see_steps():
    """The code of each function and method of these modules; this pytest or Python may not have all of them. `unittest` stays
    unloaded where it was: a pytest that tests itself keeps state in it for as long as it is loaded."""
    found, loaded = {}, set(sys.modules)
    for module in [package + "." + name for package, names in STEPS.items() for name in names]:
        try:
            __import__(module)
        except ImportError:
            continue
        for name, thing in list(vars(sys.modules[module]).items()):
            if str(getattr(thing, "__module__", "")).startswith(tuple(STEPS)):
                parts = list(vars(thing).items()) if isinstance(thing, type) else [("", thing)]
                found.update(((module, name, part), _see_code(inner)) for part, inner in parts)
    if "unittest" not in loaded:
        for name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
            del sys.modules[name]
    return found


def _see_code(thing):
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    thing = thing.fget if isinstance(thing, property) else thing
    return thing.__code__ if isinstance(thing, types.FunctionType) else None


def _see_hooks(config):
    """Those that choose tests, run them or say how they ended."""
    callers = [caller for name, caller in list(vars(config.pluginmanager.hook).items()) if name.startswith(STEERING)]
    return [hook for caller in callers for hook in _list_hooks(caller)]


def _list_hooks(caller):
    if hasattr(caller, "get_hookimpls"):
        return caller.get_hookimpls()
    return getattr(caller, "_nonwrappers", []) + getattr(caller, "_wrappers", [])


def _are_known(session):
    """Whether all is what it was, or of the tests themselves: a conftest.py or a file of tests may change how tests run."""
    steps, manager = _see_steps(), session.config.pluginmanager
    modules = set(plugin for plugin in manager.get_plugins() if _is_conftest(plugin))
    modules.update(getattr(item, "module", None) for item in getattr(session, "items", ()))
    own = set(str(getattr(module, "__file__", "")) for module in modules)
    own.update(str(item.fspath) for item in getattr(session, "items", ()))
    named = set()
    for module in modules:
        names = getattr(module, "pytest_plugins", ())
        named.update([names] if isinstance(names, str) else names)
    hooks = [
        hook.function
        for hook in _see_hooks(session.config)
        if hook.plugin not in modules and getattr(hook.plugin, "__name__", None) not in named
    ]
    new = [_see_code(getattr(hook, "__func__", hook)) for hook in hooks if all(hook != one for one in _before["hooks"])]
    new += [steps.get(place) for place, code in _before["steps"].items() if code not in (None, steps.get(place))]
    return all(_is_of_tests(getattr(code, "co_filename", None), own) for code in new)


def _is_of_tests(file, own):
    return file is not None and (file in own or os.path.realpath(file).startswith(LIBRARIES))


_places = sysconfig.get_paths()
LIBRARIES = tuple(  # with pytest, which may lie elsewhere
    os.path.join(os.path.realpath(place), "")
    for place in [_places["stdlib"], _places["purelib"], _places["platlib"], os.path.dirname(_pytest.__file__)]
    + [os.path.join(_places["stdlib"], "unittest")]
    + [os.path.dirname(sys.modules[name].__file__) for name in ("pluggy", "pytest") if name in sys.modules]
    + [place for place in sys.path if os.path.basename(place) in ("site-packages", "dist-packages")]
)
RUNNING = tuple(
    place for place in LIBRARIES if os.path.basename(place[:-1]) in ("_pytest", "pluggy", "pytest", "unittest")
)
LEAVING = (pytest.skip.Exception, pytest.xfail.Exception)  # and unittest's
IMPORTING = [  # Python 2 has none
    vars(sys.modules[name]) for name in ("_frozen_importlib", "_frozen_importlib_external") if name in sys.modules
]
CONTROLS = [plain, raises, equal, true, raises_in_unittest, rewritten]
