"""The forward pass on CPUs: packed and quantized linear layers, the fused decoder, the number of threads."""
