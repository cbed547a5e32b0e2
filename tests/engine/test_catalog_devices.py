"""A driver's device name finds its card, and never a neighbour."""

import pytest

from engine.catalog import gpu_of_device


@pytest.mark.parametrize(
    ("device_name", "slug"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("", None),
    ],
)
def test_device_names(device_name: str, slug: str | None) -> None:
    card = gpu_of_device(device_name)
    assert (card.slug if card else None) == slug
