# The image's steps are the Makefile's: `make install`, then `remat serve`.
FROM python:3.11-slim-bookworm
# PyPI's torch brings CUDA with it; the address of PyTorch's CPU wheels makes a smaller image for machines without.
ARG TORCH_INDEX=

RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 remat && install --directory --owner remat /data /srv/remat
USER remat
WORKDIR /srv/remat

# What the install needs and no more, so that a change of the code does not install torch again.
COPY --chown=remat pyproject.toml constraints.txt README.md Makefile ./
COPY --chown=remat app/__init__.py app/__init__.py
COPY --chown=remat engine/__init__.py engine/__init__.py
RUN PIP_EXTRA_INDEX_URL=$TORCH_INDEX PIP_NO_CACHE_DIR=1 make install
COPY --chown=remat . .

ENV REMAT_DATA_DIR=/data REMAT_HOST=0.0.0.0 REMAT_PORT=8000 PATH=/srv/remat/.venv/bin:$PATH
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["remat", "serve"]
