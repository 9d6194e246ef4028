# vLLM's own image with the plug-in in it. No package of vLLM's changes: their versions are the constraints of the
# installation, and the build ends if one is another afterwards, or if vLLM is not the one that the plug-in is for.
#
#     docker build -f deploy/vllm.Dockerfile -t rubato-vllm:0.1.0-0.32.0 .
#
# For Ray clusters (deploy/kuberay), with Ray and `rubato serve`:
#
#     docker build -f deploy/vllm.Dockerfile --build-arg EXTRAS='[serve,ray]' -t rubato-vllm-ray:0.1.0-0.32.0 .

FROM python:3.11-slim@sha256:e41613d42d4891e4930f79523f93f81bbc7632584ec65e36ab055f41a800b41e AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY requirements requirements
COPY src src
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# By its tag: no digest of this release has been verified. `docker buildx imagetools inspect vllm/vllm-openai:v0.32.0`
# prints it; written behind the tag, Dependabot keeps it.
FROM vllm/vllm-openai:v0.32.0
ARG EXTRAS=""
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    set -eu; \
    uv pip list --system --format=freeze > /tmp/before; \
    set -- /wheels/*.whl; \
    uv pip install --system --no-cache --constraint /tmp/before "$1$EXTRAS"; \
    uv pip list --system --format=freeze > /tmp/after; \
    grep --invert-match --line-regexp --fixed-strings --file=/tmp/after /tmp/before && exit 1; \
    python3 -c "from rubato.engines.vllm.settings import check_version; check_version()"; \
    rm /tmp/before /tmp/after
# The entry point is vLLM's: `vllm serve`, and what follows the image's name are its arguments.
