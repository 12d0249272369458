"""Shipped for users: conformance suites as plain async functions, so that a backend or agent of your own can be checked
by the same list as the built-in ones. `rollyard check` runs them; `pytest_adapter` makes tests of them."""
