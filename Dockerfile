# Two images for training and `serve`, built by `docker build --target cpu .` or `--target cuda .`; they do not run as root.
# docs/serve.md says how to run them. Models, people and recordings are mounted as volumes and never part of the image.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    SPEAKERNET_CACHE=/models/cache \
    HF_HOME=/models/hub
RUN useradd --create-home --uid 1000 speakernet \
    && mkdir --parents /models /store /data /exps \
    && chown speakernet:speakernet /models /store /data /exps
WORKDIR /opt/speakernet
COPY setup.py pyproject.toml README.md LICENSE ./
COPY configs configs
COPY speakernet speakernet
# Models and their cache, the store of people, corpora, run folders.
VOLUME ["/models", "/store", "/data", "/exps"]
EXPOSE 8000
# For `serve`; run training with `--no-healthcheck`.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["speakernet"]
CMD ["serve", "--model", "/models/model.pt", "--store", "/store/people.db", "--host", "0.0.0.0", "--port", "8000"]

# Wheels of torch without CUDA have their own index; torch and torchaudio from it must have the same version.
FROM base AS cpu
# setup.py bounds the versions of the other packages.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.11.* torchaudio==2.11.* \
    && pip install --no-cache-dir '.[serve,encryption,export,hub]'
WORKDIR /exps
USER 1000:1000

# PyPI's wheels include CUDA; the driver is the host's (`docker run --gpus all`).
FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve,encryption,export,hub,gpu]'
WORKDIR /exps
USER 1000:1000
