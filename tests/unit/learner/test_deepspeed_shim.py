import os
from types import SimpleNamespace

import pytest

from anabranch.learner import deepspeed_shim
from anabranch.learner.quiet import import_deepspeed
from anabranch.schemas.errors import ConfigError


def library(version: str = deepspeed_shim.WRITTEN_FOR, device: str = "cpu", op: str = deepspeed_shim.SHM_OP):
    """As much of deepspeed as the shim touches."""
    return SimpleNamespace(
        __version__=version,
        get_accelerator=lambda: SimpleNamespace(
            device_name=lambda: device, create_op_builder=lambda name: SimpleNamespace(NAME=op)
        ),
        ops=SimpleNamespace(),
    )


def test_the_installed_deepspeed_is_the_one_the_shims_were_written_for_and_builds_nothing():
    deepspeed = import_deepspeed()
    deepspeed_shim.apply(deepspeed)
    from deepspeed.comm.torch import build_shm_op

    assert build_shm_op() is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": "0.20.0"}, r"deepspeed 0\.20\.0 is installed"),
        ({"device": "cuda"}, "runs on cuda although"),
        ({"op": "another"}, "no longer has the op"),
    ],
)
def test_another_library_fails_loudly(changed, message):
    with pytest.raises(ConfigError, match=message):
        deepspeed_shim.apply(library(**changed))


def test_the_environment_names_the_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    deepspeed_shim.prepare_environment()
    assert os.environ["DS_ACCELERATOR"] == "cpu"
