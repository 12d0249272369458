"""Tasks made out of a package: faults laid into its source by rule (`mutations.py`), each found by the package's own tests."""
