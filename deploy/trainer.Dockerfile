# The trainer. pip's default torch is the build for CUDA; PIP_EXTRA_INDEX_URL or a wheel in the build context replaces it.
FROM python:3.11.13-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Triton compiles its launchers with a C compiler at the first step on a GPU; the caches spare later starts that.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/var/cache/headgate/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/headgate/inductor
RUN groupadd --gid 10001 headgate && useradd --uid 10001 --gid headgate --create-home headgate \
    && install -d -o headgate -g headgate /var/lib/headgate /var/lib/headgate/trainer /var/cache/headgate

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE requirements/lock.txt deploy/requirements.py ./
RUN python requirements.py pyproject.toml trainer > requirements.txt && pip install -r requirements.txt -c lock.txt
COPY gateway gateway
COPY headgate headgate
COPY scheduler scheduler
COPY trainer trainer
COPY migrations migrations
RUN pip install --no-deps . && rm -rf /src

USER headgate
WORKDIR /var/lib/headgate
CMD ["trainer", "run", "/etc/headgate/trainer.toml"]
