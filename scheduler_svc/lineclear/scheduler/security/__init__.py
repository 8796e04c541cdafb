"""Who may connect and who is calling: addresses, certificates, tokens, tenants, and how a call ends that fails."""
