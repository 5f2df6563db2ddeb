# A gateway: HTTP and queue producers. No CUDA, no GPU.
#   docker build -f deploy/docker/gateway.Dockerfile -t quire-gateway .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY requirements.txt ./
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY deploy/wheel ./deploy/wheel
COPY service ./service
COPY model ./model
COPY cuda ./cuda
RUN /opt/quire/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QUIRE_HOST=0.0.0.0
USER 10001
EXPOSE 8000
# A container's health is liveness only: an orchestrator asks /readyz before it routes requests.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]
ENTRYPOINT ["quire", "gateway"]
