"""The status page: static files, and the executed steps as server-sent events."""
