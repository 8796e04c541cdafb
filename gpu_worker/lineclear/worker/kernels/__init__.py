"""C++ kernels for CPUs: loading their `library`, and the `call_graph` that replays their calls."""
