# The worker: torch and transformers. Build from the repository root: docker build -f deploy/worker.Dockerfile .
#
# TORCH is what pip is asked for. The wheel of that name brings CUDA on Linux; for a smaller image without it, name a
# CPU build, such as torch==2.13.0+cpu, and pass PIP_EXTRA_INDEX_URL, the index that has it.
# The larger image has a compiler, for the CPU kernels; what comes out of it runs on the slim one.
FROM python:3.12-bookworm AS build
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
# pip reads both: the second also pins what the project is built with.
ENV PIP_CONSTRAINT=/src/pinned.txt PIP_BUILD_CONSTRAINT=/src/pinned.txt
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
# Which torch is TORCH's to say.
RUN sed '/^torch==/d' constraints.txt > pinned.txt
# A layer of its own: it is the largest by far and changes least.
RUN python -m venv /opt/lineclear && /opt/lineclear/bin/python -m pip install --no-cache-dir "$TORCH"
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY gpu_worker gpu_worker
COPY client client
COPY demo/model demo/model
RUN /opt/lineclear/bin/python -m pip install --no-cache-dir "$TORCH" '.[worker]'

FROM python:3.12-slim-bookworm
RUN install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear
COPY --from=build /opt/lineclear /opt/lineclear
# Nothing is fetched at run time, and what libraries cache goes to /tmp, the one place that is writable.
ENV PATH=/opt/lineclear/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/tmp/huggingface \
    XDG_CACHE_HOME=/tmp/cache \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LINECLEAR_WORKER_DIRECTORY=/run/lineclear/sockets
USER 10001:10001
# It listens nowhere: whether it is well is seen by the scheduler, which hears its heartbeat.
HEALTHCHECK NONE
ENTRYPOINT ["lineclear-worker"]
