# The gateway, or `rubato serve` over servers that run elsewhere: Python, the extra `serve`, no pip in its environment and
# no compiler. It writes nothing: run it with a read-only root file system, as any user.
#
#     docker build -f deploy/gateway.Dockerfile -t rubato-gateway:0.1.0 .
#     docker run --read-only -p 8000:8000 -v "$PWD/rubato.yaml:/etc/rubato/rubato.yaml:ro" rubato-gateway:0.1.0

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src src
RUN python -m venv --without-pip /opt/rubato \
    && pip --python /opt/rubato/bin/python install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.11-slim
COPY --from=build /opt/rubato /opt/rubato
ENV PATH=/opt/rubato/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["rubato"]
CMD ["gateway", "--config", "/etc/rubato/rubato.yaml"]
