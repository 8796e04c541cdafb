"""Attention over paged keys and values: the interface (`base`), the backends, and their `registry`."""
