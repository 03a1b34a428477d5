# underpar on a CPU. The default command is the demo, end to end in some three minutes:
#
#     docker build -t underpar .
#     docker run --rm -v "$PWD/demo:/underpar/demo" underpar
#     docker run --rm underpar .venv/bin/underpar --help
#
# The default index has torch with CUDA libraries for some platforms: gigabytes that a CPU never uses.
# --build-arg PIP_EXTRA_INDEX_URL=... names an index with CPU builds of torch.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /underpar
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL
COPY . .
RUN make .venv/.ready
CMD ["make", "demo"]
