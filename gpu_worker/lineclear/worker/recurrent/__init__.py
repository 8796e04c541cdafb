"""Layers with a recurrent state, such as Mamba and gated delta networks: their states and packed forward passes."""
