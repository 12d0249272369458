"""A path means one dialect and endpoint, with and without `/v1`, below a rollout's prefix or not."""

import pytest

from rollyard.wire import Route, route

PATHS = [
    ("POST", "/v1/chat/completions", {}, Route(dialect="chat", endpoint="generate")),
    ("POST", "/chat/completions", {}, Route(dialect="chat", endpoint="generate")),
    ("POST", "/v1/v1/chat/completions", {}, Route(dialect="chat", endpoint="generate")),
    ("POST", "/v1/chat/completions/", {}, Route(dialect="chat", endpoint="generate")),
    ("POST", "/v1/completions", {}, Route(dialect="completions", endpoint="generate")),
    ("POST", "/v1/responses", {}, Route(dialect="responses", endpoint="generate")),
    ("POST", "/responses/input_tokens", {}, Route(dialect="responses", endpoint="count_tokens")),
    ("POST", "/v1/messages", {"beta": "true"}, Route(dialect="messages", endpoint="generate")),
    ("POST", "/messages/count_tokens", {}, Route(dialect="messages", endpoint="count_tokens")),
    ("GET", "/v1/models", {}, Route(dialect="chat", endpoint="models")),
    ("GET", "/v1beta/models", {}, Route(dialect="gemini", endpoint="models")),
    ("GET", "/v1/models/org/m", {}, Route(dialect="chat", endpoint="models", model="org/m")),
    (
        "POST",
        "/v1beta/models/gemini-2.5-pro:generateContent",
        {},
        Route(dialect="gemini", endpoint="generate", model="gemini-2.5-pro", stream=False),
    ),
    (
        "POST",
        "/v1beta/models/org%2Fm%3Aq:streamGenerateContent",
        {"alt": "sse"},
        Route(dialect="gemini", endpoint="generate", model="org/m:q", stream=True),
    ),
    (
        "POST",
        "/models/m:streamGenerateContent",
        {},
        Route(dialect="gemini", endpoint="generate", model="m", stream=True, framing="array"),
    ),
    (
        "POST",
        "/v1beta/models/m:countTokens",
        {},
        Route(dialect="gemini", endpoint="count_tokens", model="m", stream=False),
    ),
]


@pytest.mark.parametrize(("method", "path", "query", "expected"), PATHS)
def test_a_path_and_the_same_below_a_rollout(method, path, query, expected):
    assert route(method, path, query) == expected
    below = route(method, f"/r/rol_1{path}", query)
    assert below is not None
    assert below.rollout_id == "rol_1"
    assert (below.dialect, below.endpoint, below.model) == (expected.dialect, expected.endpoint, expected.model)


def test_the_list_of_models_is_told_apart_by_headers():
    found = [
        route("GET", "/v1/models", {}, anthropic=a, google=g) for a, g in [(False, False), (True, False), (False, True)]
    ]
    assert [route and route.dialect for route in found] == ["chat", "messages", "gemini"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("POST", "/"),
        ("POST", ""),
        ("POST", "/r/rol_1"),
        ("POST", "/v1"),
        ("DELETE", "/v1/models/m"),
        ("POST", "/v1beta/models/m:embedContent"),
        ("POST", "/v1beta/models/:generateContent"),
        ("POST", "/v1/models/m"),
        ("POST", "/v2/messages"),
    ],
)
def test_other_paths_have_no_route(method, path):
    assert route(method, path) is None
