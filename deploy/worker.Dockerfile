# The worker: torch and transformers. Build from the repository root: docker build -f deploy/worker.Dockerfile .
# Two layers on the base: dependencies, which change with pyproject.toml and constraints.txt, and the product.
#
# TORCH is what pip is asked for. The wheel of that name brings CUDA on Linux; for a smaller image without it, name a
# CPU build, such as torch==2.13.0+cpu, and pass PIP_EXTRA_INDEX_URL, the index that has it.
# The larger image has a compiler, for the CPU kernels; what comes out of it runs on the slim one.
FROM python:3.12-bookworm AS dependencies
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
ENV PIP_CONSTRAINT=/src/pinned.txt
COPY constraints.txt pyproject.toml deploy/requirements.py ./
# Which torch is TORCH's to say. --compile, because the final root is read-only and a pip.conf may say otherwise. The
# environment has no pip itself.
RUN sed '/^torch==/d' constraints.txt > pinned.txt \
    && python3 -m venv --without-pip /opt/lineclear \
    && python3 requirements.py worker > requirements.txt \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile "$TORCH" -r requirements.txt \
    && /opt/lineclear/bin/python requirements.py --link /opt/product

FROM dependencies AS product
# pip reads it for what the project is built with.
ENV PIP_BUILD_CONSTRAINT=/src/pinned.txt
COPY hatch_build.py README.md LICENSE ./
COPY protos protos
COPY common common
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY demo/model demo/model
RUN python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile --no-deps --prefix /opt/product .

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="lineclear-worker" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="LLM inference over gRPC: the worker process, with torch and the model"
# Nothing is installed later, so there is no pip.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3.12/site-packages/pip /usr/local/lib/python3.12/site-packages/pip-*
COPY --from=dependencies /opt/lineclear /opt/lineclear
COPY --from=product /opt/product /opt/product
# Nothing is fetched at run time, and what libraries cache goes to /tmp, the one place that is writable.
ENV PATH=/opt/product/bin:/opt/lineclear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/tmp/huggingface \
    XDG_CACHE_HOME=/tmp/cache \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LINECLEAR_WORKER_SOCKET_DIRECTORY=/run/lineclear/sockets
USER 10001:10001
# It listens nowhere: whether it is well is seen by the scheduler, which hears its heartbeat.
HEALTHCHECK NONE
ENTRYPOINT ["lineclear-worker"]
