"""The service that OpenAI-compatible gateways speak: vllm.grpc.engine.VllmEngine, at --gateway-listen."""
