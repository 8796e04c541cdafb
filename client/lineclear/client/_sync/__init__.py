# Generated from _async/__init__.py by client/unasync.py. Do not edit.
"""The client for threads."""
