"""Shipped for users: conformance suites as plain async functions, so that a backend, agent or policy of your own can be held
against the same list as the built-in ones. `rollyard check` runs them; `pytest_adapter` makes tests of them."""
