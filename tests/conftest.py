"""What every test shares. Runs before torch is imported anywhere."""

import os

# The same as the runner's: test processes run beside each other, and a thread that spins takes their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
