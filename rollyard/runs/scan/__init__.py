"""Looking over what agents did, after the fact: what cannot be trusted in a success, and what explains a failure.

A scanner is a function of `AgentActions` that yields `Finding`s. Packages add their own by the entry point `rollyard.scanners`.
"""
