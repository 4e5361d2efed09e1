# kvbench on a CPU: docker build -t kvbench . && docker run -v "$PWD/results:/app/results" kvbench method=snapkv
FROM python:3.12-slim

# The C++ kernels are compiled on first use; without a compiler kvbench falls back to plain PyTorch, which is slow.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The CPU build of torch, several GB smaller than the CUDA build. Its own layer: it seldom changes.
RUN pip install --no-cache-dir 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu

COPY pyproject.toml README.md LICENSE /src/
COPY kvbench /src/kvbench
COPY kernels /src/kernels
COPY methods /src/methods
COPY conf /src/conf
RUN pip install --no-cache-dir /src && rm -rf /src

# Nobody's user runs it; results and the cached model are its own.
RUN useradd --create-home kvbench && install --directory --owner=kvbench /app
USER kvbench
WORKDIR /app
# The model is fetched now, so that a container needs no network.
RUN python -c "from kvbench.models.embedded import ensure_embedded; ensure_embedded()"
ENTRYPOINT ["python", "-m", "kvbench"]
