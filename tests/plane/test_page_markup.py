"""What agents wrote, as HTML that can do nothing (T6): Markdown, code, terminals, exit codes."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.page.markup import code, markdown, terminal, visible
from rollyard.page.steps import exit_code

TAGS = {"h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong",
        "s", "a", "div", "table", "thead", "tbody", "tr", "th", "td", "span"}  # fmt: skip
ATTRIBUTES = {"href", "title", "rel", "class", "start"}
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "![x](http://e.org/track.png)",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:x)",
    "[x](/rollouts/1/cancel)",
    "[x][r]\n\n[r]: javascript:alert(1)",
    "<javascript:alert(1)>",
    '[x](https://e.org/"onmouseover="alert(1))',
    '```"><script>alert(1)</script>\nx\n```',
    "```html\n<script>alert(1)</script>\n```",
    "|a|\n|-:|\n|<b onclick=x>|",
    "&lt;script&gt; &#60;img&#62;",
    "\x1b]8;;javascript:alert(1)\x07x\x1b]8;;\x07",
]


class Seen(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= set(attrs)


def check_harmless(html):
    seen = Seen(html)
    assert seen.tags <= TAGS
    assert {name for name, _ in seen.attributes} <= ATTRIBUTES
    assert all(value.lower().startswith(("http://", "https://")) for name, value in seen.attributes if name == "href")


@pytest.mark.adversarial
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_becomes_no_tag_attribute_or_link_of_its_own(text):
    for made in (markdown(text), terminal(text), code(text, language="html"), code(text, name="x.html"), code(text)):
        check_harmless(made)


@pytest.mark.adversarial
@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("<>\"'`[]()!*_|-:#&;=/\\\n \tabjs\x1b[31m\x07\r"), max_size=120))
def test_whatever_is_written_stays_harmless(text):
    check_harmless(markdown(text))
    check_harmless(terminal(text))


def test_markdown_is_read_as_text_with_code_in_colour_tables_and_links():
    made = markdown(
        "## Found\n\n**a** `b`\n\n```python\ndef f(): pass\n```\n\n|x|y|\n|-|-:|\n|1|2|\n\n[s](https://e.org/)"
    )
    for part in ("<h2>Found</h2>", "<strong>a</strong>", '<span class="t-k">def</span>', '<td class="n">2</td>',
                 '<a href="https://e.org/" title="https://e.org/" rel="noopener noreferrer nofollow">s</a>'):  # fmt: skip
        assert part in made


def test_a_text_of_marks_alone_is_shown_as_it_is():
    assert markdown("[" * 5000) == f'<pre class="said">{"[" * 5000}</pre>'


def test_a_terminals_colours_become_classes_and_a_line_written_over_shows_its_last_state():
    assert terminal("\x1b[32mok\x1b[0m <1;\x1b[1;31m bad\x1b[0m\x1b[2K") == (
        '<span class="a-fg2">ok</span> &lt;1;<span class="a-bold a-fg1"> bad</span>'
    )
    assert terminal("10 %\r50 %\r99 %\r\nend") == "99 %\nend"
    assert terminal("\x1b[38;5;196mx") == '<span class="a-fg1">x</span>'


def test_control_characters_and_those_that_turn_text_round_are_visible():
    assert visible("a\x00b\x1bc\u202ed\n\te") == "a␀b␛c\ufffdd\n\te"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cat: nothing.txt: No such file\nexit code 1", 1),
        ("Exit code: 0\nWall time: 0.1 seconds\nOutput:\nok", 0),
        ("Exit code 127\nsh: x: not found", 127),
        ("<returncode>2</returncode>\n<output>\n</output>", 2),
        ("some text\n\nCommand exited with code 3", 3),
        ("Process exited with status 137", 137),
        ("the exit code 5 is documented below\nmore\nand more\nend", None),
        ("a\nb\nexit code 5\nc\nd\ne", None),
        ("all tests passed", None),
        ("", None),
    ],
)
def test_the_exit_code_is_read_as_agents_word_it(text, code):
    assert exit_code(text) == code
