"""Names of backends and of their kernels for decode steps, which are read without torch."""

TRITON = "triton"
BACKEND_NAMES = ("cpu", "torch", TRITON)
DECODES = (TRITON, "cuda", "torch")  # what can make the attention of decode steps on a GPU
