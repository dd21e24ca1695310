# kvviz in a container, for an NVIDIA GPU or a CPU: torch's packages bring the CUDA libraries, the host brings the driver.
#
#   docker build -t kvviz .
#   docker run --gpus all -p 8501:8501 -v kvviz-cache:/cache kvviz
#
# Nothing is downloaded at the start: the default model is converted in the build. Models fetched later stay in /cache.
FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 kvviz \
 && install -d -o kvviz -g kvviz /app /cache

USER kvviz
WORKDIR /app
ENV KVVIZ_CACHE=/cache/kvviz \
    HF_HOME=/cache/huggingface \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

COPY --chown=kvviz:kvviz Makefile requirements.txt requirements-model.txt ./
RUN make install

COPY --chown=kvviz:kvviz . .
RUN .venv/bin/python -c 'import kvviz; kvviz.load(device="cpu")'

VOLUME /cache
EXPOSE 8501
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD [".venv/bin/python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]

CMD [".venv/bin/python", "serve.py", "--server.port=8501", "--server.address=0.0.0.0", "--server.headless=true", "--server.fileWatcherType=none"]
