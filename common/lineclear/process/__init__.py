"""Runtime that both processes share: logging, settings, sockets, parent death."""
