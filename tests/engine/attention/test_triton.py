"""The Triton kernels in a process of their own: Triton decides at import whether it compiles or interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
# Triton's interpreter multiplies the bit patterns of bf16 as integers, so bf16 needs the real thing.
DTYPES = {"float32": 1e-5, "float16": 2e-3} | ({"bfloat16": 2e-2} if CUDA else {})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_agree_with_float64(dtype: str) -> None:
    environment = os.environ | ({} if CUDA else {"TRITON_INTERPRET": "1"})
    program = Path(__file__).with_name("triton_errors.py")
    done = subprocess.run(
        [sys.executable, program, dtype], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 7
    for shape, found in errors.items():
        assert len(found) == 4
        assert max(found) < DTYPES[dtype], (shape, found)
