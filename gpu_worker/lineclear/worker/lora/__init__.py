"""LoRA adapters: several on the rows of one batch."""
