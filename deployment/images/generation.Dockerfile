# Engines alone: torch, vLLM and Ray for CUDA machines, without Megatron-core.
# Built by deployment/images/build.sh, which gives it the folder deployment/ to read. The code is not
# in it: Flyte brings it with the registration, so that a change of code needs no new image.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# What the site's network asks for, then Debian's packages; DEBIAN_MIRROR: where they come from.
ARG DEBIAN_MIRROR
# gcc: Triton compiles its launchers on first use. wget: KubeRay's probes of a Ray pod call it.
RUN --mount=type=bind,target=/deployment \
    bash /deployment/images/debian.sh gcc libc6-dev libnuma1 wget

# The index of packages, where it is not PyPI; else as site/pip.conf has it.
ARG PIP_INDEX_URL
RUN --mount=type=bind,target=/deployment \
    bash /deployment/images/install.sh gpu.txt --without megatron-core

# The driver's libraries are put in by NVIDIA's container toolkit, where the loader finds them, or by GKE in
# /usr/local/nvidia, which is named here: the loader's cache is as old as the image. It holds the driver
# alone, and torch looks for the CUDA libraries of its wheels first (their RPATH).
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64 \
    PATH=$PATH:/usr/local/nvidia/bin \
    NEMO_RL_HOME=/var/nemo_rl \
    PYTHONPATH=/home/nemo \
    PYTHONUNBUFFERED=1

RUN useradd --uid 1000 --create-home nemo \
 && install --directory --owner nemo --group nemo /var/nemo_rl
USER 1000:1000
WORKDIR /home/nemo
