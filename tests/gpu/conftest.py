"""Without a GPU there is nothing to collect here, except for the run under Triton's interpreter that
tests/unit/kernels/test_triton.py starts."""

from __future__ import annotations

import os

import torch

collect_ignore_glob = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") else ["test_*.py"]
