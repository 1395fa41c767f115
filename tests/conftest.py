"""One thread per test process: workers share the cores already, and threads that wait for one another slow them."""

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before numpy and torch are imported; children inherit it
