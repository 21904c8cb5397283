# vLLM's CPU build, as `make engine` installs it.
FROM python:3.11.13-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 headgate && useradd --uid 10001 --gid headgate --create-home headgate

COPY requirements/engine-cpu.txt /tmp/requirements.txt
RUN pip install torch==2.13.0 && pip install --no-deps -r /tmp/requirements.txt && rm /tmp/requirements.txt

USER headgate
WORKDIR /home/headgate
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
