"""Validate requests: what each field may be, and all violations of a request together."""
