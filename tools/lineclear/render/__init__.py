"""Pictures of executed steps: a timeline as SVG, a Chrome trace, and the attention mask of a step. Pure functions."""
