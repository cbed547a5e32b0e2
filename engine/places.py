"""Where Remat keeps files of its own. Torch-free, so that the app and the engine agree."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "REMAT_DATA_DIR"


def data_home() -> Path:
    """The data directory where nobody chose one."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "remat"


def data_directory() -> Path:
    """The data directory of this process: $REMAT_DATA_DIR, which the app sets for a runner."""
    chosen = os.environ.get(DATA_VARIABLE)
    return Path(chosen) if chosen else data_home()
