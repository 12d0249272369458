"""Dockerfiles are read as the reference describes; what cannot be honoured is refused with its line."""

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.errors import ConfigError
from rollyard.images import dockerfile_words
from rollyard.images.build_context import Context, Ignore
from rollyard.images.dockerfile import parse


def plan(text, **args):
    return parse(text, file="Dockerfile", args=args)


def test_continuations_comments_and_lines():
    found = plan("# a comment\nFROM host\n\nRUN one && \\\n    # between\n\n    two\nrun three \\\n  four\n")
    run, again = found.stages[0].instructions
    assert (run.line, run.text.split()) == (4, ["one", "&&", "two"])
    assert (again.kind, again.line, again.text.split()) == ("RUN", 8, ["three", "four"])


def test_the_escape_directive_changes_continuation():
    found = plan("# escape=`\nFROM host\nRUN dir C:\\ `\n && x\n")
    assert found.escape == "`"
    assert found.stages[0].instructions[0].text == "dir C:\\  && x"


def test_exec_and_shell_forms():
    found = plan('FROM host\nCMD ["a", "b c"]\nENTRYPOINT run me\nRUN [not json]\nSHELL ["/bin/bash", "-c"]\n')
    cmd, entry, run, shell = found.stages[0].instructions
    assert cmd.argv == ("a", "b c")
    assert entry.argv is None
    assert run.argv is None
    assert shell.argv == ("/bin/bash", "-c")


def test_heredocs_keep_their_text_and_their_quoting():
    found = plan("FROM host\nRUN <<EOF\necho $HOME\n# kept\nEOF\nCOPY <<-'A' <<B /x/\n\tone\n\tA\ntwo $V\nB\nUSER me\n")
    run, copy, user = found.stages[0].instructions
    assert run.heredocs[0].text == "echo $HOME\n# kept\n"
    assert [(h.name, h.text, h.literal) for h in copy.heredocs] == [("A", "one\n", True), ("B", "two $V\n", False)]
    assert user.line == 11


def test_flags_are_taken_off_and_unknown_ones_are_refused():
    copy = plan("FROM host\nCOPY --from=b --chown=u:g --chmod=755 a b\n").stages[0].instructions[0]
    assert (copy.flag("from"), copy.flag("chown"), copy.flag("chmod"), copy.text) == ("b", "u:g", "755", "a b")
    with pytest.raises(ConfigError, match="Dockerfile:2: COPY --parents is not supported"):
        plan("FROM host\nCOPY --parents a b\n")


def test_stages_and_global_arguments():
    text = "ARG BASE=host\nARG TAG=${BASE}-x\nFROM ${BASE} AS one\nRUN a\nFROM one\nCOPY --from=one /a /b\n"
    found = plan(text)
    assert [(s.name, s.base) for s in found.stages] == [("one", "host"), (None, "one")]
    assert found.globals["TAG"] == "host-x"
    assert found.index("ONE") == 0
    assert found.index("0") == 0
    assert found.index("nine") is None
    assert plan(text, BASE="other").stages[0].base == "other"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Dockerfile:1: there is no FROM"),
        ("RUN x\nFROM host\n", "Dockerfile:1: RUN stands before any FROM"),
        ("FROM host\nFETCH x\n", "Dockerfile:2: unknown instruction 'FETCH'"),
        ("FROM host\n\nONBUILD RUN x\n", "Dockerfile:3: ONBUILD"),
        ("FROM\n", "Dockerfile:1"),
        ("FROM a b\n", "Dockerfile:1: FROM wants"),
        ("FROM host\nRUN <<EOF\nx\n", "Dockerfile:2: the here-document EOF never ends"),
        ("FROM ${A%x}\n", "not supported"),
        ("# escape=x\nFROM host\n", "escape character"),
    ],
)
def test_errors_name_the_line(text, said):
    with pytest.raises(ConfigError, match=said):
        plan(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$Ab", ""),
        ("${N:-d}", "d"),
        ("${E:-d}", "d"),
        ("${E-d}", ""),
        ("${A:+set}", "set"),
        ("${N:+set}", ""),
        ("${N:-${A}x}", "1x"),
        ("'$A'", "$A"),
        ('"$A b"', "1 b"),
        (r"\$A", "$A"),
        (r'"\$A \n"', r"$A \n"),
        ("a$", "a$"),
    ],
)
def test_variables(text, value):
    assert dockerfile_words.expand(text, {"A": "1", "E": ""}) == value


def test_assignments_in_both_forms():
    assert dockerfile_words.assignments('a=1 b="x y" c=$a d=x\\ y', {"a": "old"}) == {
        "a": "1",
        "b": "x y",
        "c": "old",
        "d": "x y",
    }
    assert dockerfile_words.assignments("name some words here", {}) == {"name": "some words here"}
    with pytest.raises(ValueError, match="name=value"):
        dockerfile_words.assignments("a=1 b", {})
    with pytest.raises(ValueError, match="never closed"):
        dockerfile_words.assignments("a='1", {})


@given(st.text(alphabet="ab $\\'\"{}:-=", max_size=20))
def test_no_text_breaks_the_word_reader(text):
    for act in (dockerfile_words.split, lambda t: dockerfile_words.expand(t, {"a": "1"})):
        try:
            act(text)
        except ValueError:
            pass


def test_dockerignore_rules():
    ignored = Ignore(["# c", "*.log", "build", "!build/keep", "**/tmp", "/docs/*.md", "!docs/a.md"])
    assert [
        p for p in ("a.log", "x/a.log", "build/x", "build/keep", "q/r/tmp/f", "docs/b.md", "docs/a.md") if ignored(p)
    ] == [
        "a.log",
        "build/x",
        "q/r/tmp/f",
        "docs/b.md",
    ]


def test_an_engine_is_sent_what_our_own_build_would_copy(tmp_path):
    """Docker's rules, not git's: `*.log` is for the top folder alone, and the Dockerfile is sent whatever they say."""
    files = {
        ".dockerignore": "*.log\nbuild\n!build/keep\nDockerfile\n",
        "Dockerfile": "FROM host\n",
        "a.log": "",
        "b": "",
    }
    for name, text in {**files, "x/a.log": "", "build/out": "", "build/keep": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    made = Context(tmp_path).pack()
    made.seek(0)
    with tarfile.open(fileobj=made) as archive:
        assert archive.getnames() == [".dockerignore", "Dockerfile", "b", "build/keep", "x", "x/a.log"]
        assert {member.mtime + member.uid + member.gid for member in archive.getmembers()} == {0}


def test_the_build_folder_is_all_there_is(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.txt").write_text("a")
    (tmp_path / "f" / "out").symlink_to("/etc")
    context = Context(tmp_path / "f")
    assert [item.name for item in context.find("*.txt")] == ["a.txt"]
    for bad in ("../f", "/../x", "out", "none", "z*"):
        with pytest.raises(ValueError):
            context.find(bad)
