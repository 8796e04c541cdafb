"""Requests and their answers, free of gRPC: validation, admission, output streams, sessions, submitted requests."""
