"""What is served to browsers is what was published, under a licence that is served with it."""

import hashlib
import json

from app.settings import static_directory

VENDOR = static_directory() / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())


def test_every_vendored_file_has_its_hash_in_the_manifest() -> None:
    for library in MANIFEST:
        folder = VENDOR / library["folder"]
        found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        assert found == library["sha256"], library["name"]
        assert "LICENSE" in found


def test_nothing_is_vendored_outside_the_manifest() -> None:
    folders = {path.name for path in VENDOR.iterdir() if path.is_dir()}
    assert folders == {library["folder"] for library in MANIFEST}
