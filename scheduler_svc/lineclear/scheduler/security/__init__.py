"""Authentication: TLS certificates, bearer tokens, tenants, and the statuses of failed calls."""
