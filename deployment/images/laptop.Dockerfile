# The shape `laptop` on a cluster without GPUs: trainers and engines with torch and vLLM for CPUs.
# Built by deployment/images/build.sh, which gives it the folder deployment/ to read. The code is not
# in it: Flyte brings it with the registration, so that a change of code needs no new image.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# What the site's network asks for, then Debian's packages; DEBIAN_MIRROR: where they come from.
ARG DEBIAN_MIRROR
# gcc: torch compiles kernels on first use. wget: KubeRay's probes of a Ray pod call it.
RUN --mount=type=bind,target=/deployment \
    bash /deployment/images/debian.sh gcc g++ libnuma1 wget

# The index of packages, where it is not PyPI; else as site/pip.conf has it.
ARG PIP_INDEX_URL
RUN --mount=type=bind,target=/deployment \
    bash /deployment/images/install.sh cpu.txt

ENV NEMO_RL_HOME=/var/nemo_rl \
    PYTHONPATH=/home/nemo \
    PYTHONUNBUFFERED=1

RUN useradd --uid 1000 --create-home nemo \
 && install --directory --owner nemo --group nemo /var/nemo_rl
USER 1000:1000
WORKDIR /home/nemo
