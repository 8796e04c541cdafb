"""`python -m lineclear.client.cli`."""

from . import main

main()
