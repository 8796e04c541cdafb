"""What others see of the core: its executed steps and its state, as the messages of steps.proto."""
