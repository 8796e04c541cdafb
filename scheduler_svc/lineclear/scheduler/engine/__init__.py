"""The engine thread, its link to the worker, and the worker process."""
