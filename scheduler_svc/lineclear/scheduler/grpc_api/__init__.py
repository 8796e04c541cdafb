"""The gRPC services: what a call must satisfy, what it waits for, and what it is answered."""
