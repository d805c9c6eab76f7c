"""`python -m jobs` is the command line."""

from jobs.cli import main

main()
