# The scheduler: CPU only, no torch. Build from the repository root: docker build -f deploy/scheduler.Dockerfile .
# Two layers on the base: dependencies, which change with pyproject.toml and constraints.txt, and the product.
FROM python:3.12-slim-bookworm AS dependencies
WORKDIR /src
ENV PIP_CONSTRAINT=/src/constraints.txt
COPY constraints.txt pyproject.toml deploy/requirements.py ./
# --compile, because the final root is read-only and a pip.conf may say otherwise. The environment has no pip itself.
RUN python3 -m venv --without-pip /opt/lineclear \
    && python3 requirements.py scheduler > requirements.txt \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile -r requirements.txt \
    && /opt/lineclear/bin/python requirements.py --link /opt/product

FROM dependencies AS product
# pip reads it for what the project is built with.
ENV PIP_BUILD_CONSTRAINT=/src/constraints.txt
COPY hatch_build.py README.md LICENSE ./
COPY protos protos
COPY common common
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY demo/model demo/model
# No compiler is here, so the worker's kernels are not built.
RUN python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile --no-deps --prefix /opt/product .

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="lineclear-scheduler" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="LLM inference over gRPC: the scheduler process"
# A volume mounted here takes over owner and mode; the process makes its own 0700 folder inside.
# Nothing is installed later, so there is no pip.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3.12/site-packages/pip /usr/local/lib/python3.12/site-packages/pip-*
COPY deploy/health_check.py /opt/health_check.py
COPY --from=dependencies /opt/lineclear /opt/lineclear
COPY --from=product /opt/product /opt/product
ENV PATH=/opt/product/bin:/opt/lineclear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    LINECLEAR_HEALTH_LISTEN=0.0.0.0:50052 \
    LINECLEAR_SOCKET_DIRECTORY=/run/lineclear/sockets
# A number, because Kubernetes cannot tell from a name that it is not root.
USER 10001:10001
EXPOSE 50051 50052 50053
# The service "liveness": a scheduler that waits for its worker, or drains, is well. Without gRPC: 20 ms instead of 250.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/health_check.py", "127.0.0.1", "50052"]
ENTRYPOINT ["lineclear-scheduler"]
