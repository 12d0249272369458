"""The command line: one file per verb, no logic. Verbs are imported when they are asked for."""
