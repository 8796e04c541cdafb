# The scheduler: CPU only, no torch. Build from the repository root: docker build -f deploy/scheduler.Dockerfile .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
# pip reads both: the second also pins what the project is built with.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY demo/model demo/model
# No compiler is here, so the worker's kernels are not built.
RUN python -m venv /opt/lineclear && /opt/lineclear/bin/python -m pip install --no-cache-dir '.[scheduler]'

FROM python:3.12-slim-bookworm
# A volume mounted here takes over owner and mode; the process makes its own 0700 folder inside.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear
COPY --from=build /opt/lineclear /opt/lineclear
ENV PATH=/opt/lineclear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    LINECLEAR_HEALTH_LISTEN=0.0.0.0:50052 \
    LINECLEAR_SOCKET_DIRECTORY=/run/lineclear/sockets
# A number, because Kubernetes cannot tell from a name that it is not root.
USER 10001:10001
EXPOSE 50051 50052 50053
# The service "liveness": a scheduler that waits for its worker, or drains, is well.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import grpc; from grpc_health.v1 import health_pb2 as pb, health_pb2_grpc as rpc; stub = rpc.HealthStub(grpc.insecure_channel('127.0.0.1:50052')); raise SystemExit(stub.Check(pb.HealthCheckRequest(service='liveness'), timeout=4).status != pb.HealthCheckResponse.SERVING)"]
ENTRYPOINT ["lineclear-scheduler"]
