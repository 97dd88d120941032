"""`python -m memfit`: the command line, for an interpreter whose scripts are not on the path."""

from memfit.cli import main

main()
