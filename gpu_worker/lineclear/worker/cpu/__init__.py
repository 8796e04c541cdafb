"""The forward pass on a CPU: packed and quantised linear layers, the fused decoder, the number of threads."""
