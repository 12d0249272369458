"""`python -m rollyard`: the command line, where the script is not on the path."""

from rollyard.cli.main import main

main()
