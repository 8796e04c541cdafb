"""Flight recorder: recordings of the core's calls and decisions, and their replay."""
