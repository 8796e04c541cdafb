# The worker: torch and transformers. Build from the repository root: docker build -f deploy/worker.Dockerfile .
# Adds two layers to the base: the dependencies, which change with pyproject.toml and constraints.txt, and the product.
#
# TORCH is the requirement of torch for pip. The default wheel contains CUDA on Linux. For a smaller image without CUDA,
# set a CPU build, such as torch==2.13.0+cpu, and its index as PIP_EXTRA_INDEX_URL.
# PYTHON is 3.11 or later, and REVISION the commit for the label.
# The build stages use the larger base image, which has a compiler for the CPU kernels. The kernels run on the slim one.
ARG PYTHON=3.11
FROM python:${PYTHON}-bookworm AS dependencies
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
ENV PIP_CONSTRAINT=/src/pinned.txt
COPY constraints.txt pyproject.toml deploy/requirements.py ./
# With CUDA, accelerate lets transformers read weights straight to a GPU; on a CPU it would only take time to import.
# TORCH replaces the pinned torch. --compile overrides a pip.conf; the root filesystem is read-only at run time. The
# environment contains no pip.
RUN sed '/^torch==/d' constraints.txt > pinned.txt \
    && python3 -m venv --without-pip /opt/lineclear \
    && python3 requirements.py worker > requirements.txt \
    && case "$TORCH" in *+cpu*) ;; *) echo accelerate >> requirements.txt ;; esac \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile "$TORCH" -r requirements.txt \
    && /opt/lineclear/bin/python requirements.py --link /opt/product

FROM dependencies AS product
# Constrains the build requirements of the project.
ENV PIP_BUILD_CONSTRAINT=/src/pinned.txt
COPY hatch_build.py README.md LICENSE deploy/bill_of_materials.py ./
COPY protos protos
COPY common common
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY tools tools
COPY embedded embedded
# The demo model is left out: its folder is empty.
RUN mkdir -p demo/model \
    && python3 -m pip --python /opt/lineclear/bin/python install --no-cache-dir --compile --no-deps --prefix /opt/product . \
    && /opt/lineclear/bin/python bill_of_materials.py /opt/product/sbom.cdx.json

FROM python:${PYTHON}-slim-bookworm
# With CUDA, Triton builds the launchers of its kernels by a C compiler at their first use.
ARG TORCH
RUN case "$TORCH" in \
        *+cpu*) ;; \
        *) apt-get update \
            && apt-get install --yes --no-install-recommends 'gcc=4:12.2.0-*' 'libc6-dev=2.36-*' \
            && rm -rf /var/lib/apt/lists/* ;; \
    esac
# Packages are not installed at run time, so pip is removed.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip*
COPY --from=dependencies /opt/lineclear /opt/lineclear
COPY --from=product /opt/product /opt/product
# Disables downloads at run time. Libraries write their caches to /tmp, the only writable folder.
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
# The worker has no port. The scheduler monitors it by its heartbeats.
HEALTHCHECK NONE
# Last, because it differs in every build.
ARG REVISION=
LABEL org.opencontainers.image.title="lineclear-worker" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.description="LLM inference over gRPC: the worker process, with torch and the model"
ENTRYPOINT ["lineclear-worker"]
