"""What every test shares. Runs before torch is imported anywhere."""

import gc
import os
from collections.abc import Iterator

import pytest

# The same as the runner's: test processes run beside each other, and a thread that spins on takes their cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(autouse=True, scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runners of all tests keep this machine's bandwidths in one place, and not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True, scope="session")
def thawed_heap() -> Iterator[None]:
    """Libraries check at exit that nothing of theirs is left."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def small_heap(thawed_heap: None) -> None:
    """The simulator collects garbage around each recording: it must not walk again what earlier modules left."""
    gc.collect()
    gc.freeze()
