"""Conformance suites, shipped: plain async functions that a user runs against a part of their own."""
