"""Claims and the commands that measure them. `make bench` lists them."""

import os

# As the runner's, so that a benchmark times what a run would.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
