"""`python -m lineclear.cli`."""

from . import main

main()
