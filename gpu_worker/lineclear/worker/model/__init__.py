"""Loading a model: checkpoint checks, compatibility probe, fused forward pass."""
