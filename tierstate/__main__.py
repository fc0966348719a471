"""``python -m tierstate``: the command line, where the script ``tierstate`` is not on the path."""

from .cli import main

main()
