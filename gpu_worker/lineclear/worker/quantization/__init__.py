"""Quantized weights: their one form in memory, and the formats that are read into it."""
