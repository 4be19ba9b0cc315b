"""`python -m baton.cli` is `baton`."""

from baton.cli.app import main

main()
