# One model on one GPU. The kernels are compiled at the first start and kept in /var/cache/quire: mount a volume there.
# The host brings the driver (580 or newer) and the NVIDIA container toolkit; everything else is in the packages.
#   docker build -f deploy/docker/worker.Dockerfile -t quire-worker .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY requirements-cuda.txt ./
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements-cuda.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY deploy/wheel ./deploy/wheel
COPY service ./service
COPY model ./model
COPY cuda ./cuda
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home quire \
    && install -d -o quire /var/cache/quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QUIRE_CACHE_DIR=/var/cache/quire \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
VOLUME /var/cache/quire
# No listening port: its health is its worker card on Redis, which the gateway's /readyz reads.
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire", "worker"]
