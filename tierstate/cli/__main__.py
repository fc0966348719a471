"""Runs the command line for ``python -m tierstate.cli``."""

from tierstate.cli import main

main()
