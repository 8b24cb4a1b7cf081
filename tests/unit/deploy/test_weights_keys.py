from __future__ import annotations

import re
import stat

import pytest

from anabranch.deploy.weights_keys import keygen, signature_check, signature_words
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.signing import Signer, load_signer
from tests.unit.deploy.weights_channels import Made


@pytest.fixture
def signer(tmp_path) -> Signer:
    keygen(tmp_path / "key.pem")
    return load_signer(tmp_path / "key.pem")


@pytest.fixture
def plain() -> Manifest:
    made = Made(MemoryWeightChannel(MemoryWeightStore("r")), "r")
    made.begin()
    return made.channel.manifests([(PolicyVersion(1, 0), "anchor")])[0]


def test_a_new_key_and_what_to_do_with_it(tmp_path):
    path = tmp_path / "key.pem"
    text = keygen(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    public = load_signer(path).public_key
    assert f"public key {public}" in text
    learner, producers = re.findall(r"\[channel\]\n +(.*)", text)
    assert load_config(f"[channel]\n{learner}").channel.signing_key_file == path
    assert load_config(f"[channel]\n{producers}").channel.trusted_keys == (public,)
    with pytest.raises(ConfigError, match="exists; a signing key is not overwritten"):
        keygen(path)


def test_signatures_in_words(plain, signer):
    signed = signer.sign(plain)
    forged = signed.model_copy(update={"learner_step": 77})
    key = signer.public_key
    assert signature_words(plain, ()) == "none"
    assert "followers REFUSE it" in signature_words(plain, (key,))
    assert signature_words(signed, (key,)) == f"by {key}: valid, trusted"
    assert signature_words(signed, ()).startswith(f"by {key}: valid; ")
    assert "not of channel.trusted_keys: followers REFUSE it" in signature_words(signed, ("0" * 64,))
    for trusted in ((), (key,)):
        assert signature_words(forged, trusted) == f"by {key}: NOT VALID, the manifest was altered or forged"


def test_the_check_refuses_what_followers_refuse(plain, signer):
    signed = signer.sign(plain)
    forged = signed.model_copy(update={"learner_step": 77})
    trusting = signature_check((signer.public_key,))
    trusting(signed)
    for bad in (plain, forged):
        with pytest.raises(ManifestError):
            trusting(bad)
    open_to_all = signature_check(())
    open_to_all(plain)
    open_to_all(signed)
    with pytest.raises(ManifestError):
        open_to_all(forged)
