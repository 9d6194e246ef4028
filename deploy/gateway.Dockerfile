# The gateway, or `rubato serve` over servers that run elsewhere: Python, the extra `serve`, no pip in its environment and
# no compiler. It writes nothing: run it with a read-only root file system, as any user.
#
#     docker build -f deploy/gateway.Dockerfile -t rubato-gateway:0.1.0 .
#     docker run --read-only -p 8000:8000 -v "$PWD/rubato.yaml:/etc/rubato/rubato.yaml:ro" rubato-gateway:0.1.0

FROM python:3.11-slim@sha256:e41613d42d4891e4930f79523f93f81bbc7632584ec65e36ab055f41a800b41e AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY requirements requirements
COPY src src
RUN python -m venv --without-pip /opt/rubato \
    && pip install --no-cache-dir --require-hashes --requirement requirements/build.txt \
    && pip --python /opt/rubato/bin/python install --no-cache-dir --require-hashes --no-deps --requirement requirements/serve.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/rubato/bin/python install --no-cache-dir --no-deps /wheels/*.whl

FROM python:3.11-slim@sha256:e41613d42d4891e4930f79523f93f81bbc7632584ec65e36ab055f41a800b41e
COPY --from=build /opt/rubato /opt/rubato
ENV PATH=/opt/rubato/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["rubato"]
CMD ["gateway", "--config", "/etc/rubato/rubato.yaml"]
