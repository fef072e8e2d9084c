# envplan in a container, for planning and for following plans on nodes with NVIDIA's runtime:
#   docker build -t envplan .
#   docker run --rm -v "$PWD:/work" envplan solve sosp24-a100-gpt3-xl-4stage
# Measuring and following need the GPUs: docker run --gpus all ...
FROM python:3.13-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
# Planning needs no rights; who may set clocks is the host's to say (docs/who-may-set-clocks.md).
RUN useradd --create-home --uid 1000 envplan
USER 1000
WORKDIR /work
ENTRYPOINT ["envplan"]
CMD ["--help"]
