"""Executed steps for observers: a bounded history, the state of the scheduler, and the watchers that read both."""
