"""What the core decided, kept and run again: checkpoints, the flight recorder, replay."""
