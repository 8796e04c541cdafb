# The scheduler: CPU only, no torch. Build from the repository root: docker build -f deploy/scheduler.Dockerfile .
# Adds two layers to the base: the dependencies, which change with pyproject.toml and constraints.txt, and the product.
#
# PYTHON is 3.11 or later, and REVISION the commit for the label. EXTRAS are the extras to install: scheduler,tracing for
# --otlp-traces-endpoint, scheduler,gateway for --gateway-listen.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS dependencies
ARG EXTRAS=scheduler
WORKDIR /src
ENV PIP_CONSTRAINT=/src/constraints.txt
COPY constraints.txt pyproject.toml deploy/requirements.py ./
# --compile overrides a pip.conf; the root filesystem is read-only at run time. The environment contains no pip.
RUN python3 -m venv --without-pip /opt/lineclear \
    && python3 requirements.py "$EXTRAS" > requirements.txt \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile -r requirements.txt \
    && /opt/lineclear/bin/python requirements.py --link /opt/product

FROM dependencies AS product
# Constrains the build requirements of the project.
ENV PIP_BUILD_CONSTRAINT=/src/constraints.txt
COPY hatch_build.py README.md LICENSE deploy/bill_of_materials.py ./
COPY protos protos
COPY common common
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY tools tools
COPY embedded embedded
# The base has no compiler, so the worker's kernels are not built.
# The demo model is left out: its folder is empty.
RUN mkdir -p demo/model \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile --no-deps --prefix /opt/product . \
    && /opt/lineclear/bin/python bill_of_materials.py /opt/product/sbom.cdx.json

FROM python:${PYTHON}-slim-bookworm
# A volume mounted here inherits owner and mode. The process creates its own 0700 folder inside.
# Packages are not installed at run time, so pip is removed.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip*
COPY deploy/health_check.py /opt/health_check.py
COPY --from=dependencies /opt/lineclear /opt/lineclear
COPY --from=product /opt/product /opt/product
ENV PATH=/opt/product/bin:/opt/lineclear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    LINECLEAR_HEALTH_LISTEN=0.0.0.0:50052 \
    LINECLEAR_SOCKET_DIRECTORY=/run/lineclear/sockets
# Numeric, because runAsNonRoot of Kubernetes cannot verify a user name.
USER 10001:10001
EXPOSE 50051 50052 50053
# Health name "liveness": SERVING also without a worker and while draining. The script takes 20 ms; with grpcio, 250 ms.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/health_check.py", "127.0.0.1", "50052"]
# Last, because it differs in every build.
ARG REVISION=
LABEL org.opencontainers.image.title="lineclear-scheduler" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="LLM inference over gRPC: the scheduler process"
ENTRYPOINT ["lineclear-scheduler"]
