"""`serve plane`: options to a running server and a clean stop."""
