"""Loading of a model: its files, its configuration, its attention layers, and checks of all three."""
