"""The gRPC services and their server: interceptors, readers and writers of messages, health checks."""
