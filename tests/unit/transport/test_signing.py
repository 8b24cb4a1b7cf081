from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.manifest import Chunk, Manifest, Signature
from anabranch.transport.signing import Signer, Verifier, load_signer, write_key_pair
from tests.unit.schemas.test_manifest import ANCHOR, manifest


@pytest.fixture
def signer() -> Signer:
    return Signer(Ed25519PrivateKey.from_private_bytes(b"1" * 32))


def test_what_a_trusted_key_signed_passes(signer: Signer) -> None:
    other = Signer(Ed25519PrivateKey.generate())
    verifier = Verifier([other.public_key, signer.public_key])
    for made in (manifest(), manifest(**ANCHOR)):
        signed = signer.sign(made)
        assert signed.model_copy(update={"signature": None}) == made
        assert signed.signature is not None
        assert signed.signature.key == signer.public_key
        verifier.check(signed)
        verifier.check(Manifest.from_json(signed.model_dump_json()))
        verifier.check(other.sign(signed))


KEY = "48075a597e721a156e2e0799de5cc0c5324dc6e7eaf1cdd46250868ec53215dd"
SIGNATURE = (
    "85a62042e59872a4788bf76e487ec60afa6047547345ae4266bc9e16d22340e5"
    "b56eccb52e2fbffc0201ce233994c7ceb3951aecf1f0d74540c0c16d7ba10805"
)
WRITTEN = (
    '{"format":"anabranch.manifest/2","kind":"delta","run":"r","epoch":1,"version":2,"base":{"epoch":1,"version":1,'
    '"digest":"00000000000000000000000000000001"},"result_digest":"00000000000000000000000000000002","layout_hash":'
    '"00000000000000000000000000000003","codec":"c/1","chunks":[{"digest":'
    '"0000000000000000000000000000000000000000000000000000000000000004","size_bytes":5}],"full_bytes":6,'
    '"changed_elements":7,"total_elements":8,"learner_step":9,"fork_version":0,"published_ms":10,"signature":null}'
)


def test_a_signature_is_the_same_wherever_and_whenever_it_is_made(signer: Signer) -> None:
    """Were the signed bytes to change, every signature made before would be a bad one."""
    signed = signer.sign(Manifest.from_json(WRITTEN))
    assert signed.signature == Signature(key=KEY, signature=SIGNATURE)
    assert signer.sign(signed) == signed


def test_without_keys_everything_passes(signer: Signer) -> None:
    Verifier([]).check(manifest())
    Verifier([]).check(signer.sign(manifest()))


def test_unsigned_is_refused_once_keys_are_set(signer: Signer) -> None:
    with pytest.raises(ManifestError, match=r"delta e2\.v8 of run 'r' refused: it is not signed, and .*trusted_keys"):
        Verifier([signer.public_key]).check(manifest())


def test_a_strangers_signature_is_refused(signer: Signer) -> None:
    stranger = Signer(Ed25519PrivateKey.generate())
    with pytest.raises(ManifestError, match=f"signed by {stranger.public_key}, which is not in channel.trusted_keys"):
        Verifier([signer.public_key]).check(stranger.sign(manifest()))


@pytest.mark.parametrize(
    "forged",
    [
        {"epoch": 3, "base": manifest().base.model_copy(update={"epoch": 3})},  # type: ignore[union-attr]
        {"base": manifest().base.model_copy(update={"digest": "f" * 32})},  # type: ignore[union-attr]
        {"result_digest": "f" * 32},
        {"chunks": (Chunk(digest="f" * 64, size_bytes=10),)},
        {"run": "other"},
        {"published_ms": 2},
    ],
)
def test_a_manifest_that_was_altered_is_refused(signer: Signer, forged: dict[str, object]) -> None:
    signed = signer.sign(manifest())
    altered = Manifest.model_validate({**dict(signed), **forged})
    with pytest.raises(ManifestError, match=r"its signature by .* is not of this manifest: it was altered"):
        Verifier([signer.public_key]).check(altered)


def test_a_strangers_signature_under_a_trusted_name_is_refused(signer: Signer) -> None:
    signature = Signer(Ed25519PrivateKey.generate()).sign(manifest()).signature
    assert signature is not None
    posed = manifest(signature=Signature(key=signer.public_key, signature=signature.signature))
    with pytest.raises(ManifestError, match="is not of this manifest"):
        Verifier([signer.public_key]).check(posed)


@pytest.mark.parametrize("key", ["", "ab", "z" * 64, "0" * 63])
def test_what_is_no_key_is_not_trusted(key: str) -> None:
    with pytest.raises(ConfigError, match="is not an Ed25519 public key"):
        Verifier([key])


def test_a_key_pair_is_written_for_its_owner_only_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    public = write_key_pair(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_signer(path).public_key == public
    Verifier([public]).check(load_signer(path).sign(manifest()))
    content = path.read_bytes()
    with pytest.raises(ConfigError, match="exists; a signing key is not overwritten"):
        write_key_pair(path)
    assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_key_pair(tmp_path / "nowhere" / "key.pem")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.pem"
    write_key_pair(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"open to others \(mode {mode:o}\); chmod 600"):
        load_signer(path)


def test_a_credential_of_systemd_may_be_read_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd lets a service's user in by an ACL, and an ACL's mask shows as the rights of the group."""
    path = tmp_path / "signing-key"
    public = write_key_pair(path)
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load_signer(path).public_key == public
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="open to others"):
        load_signer(path)
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="open to others"):
        load_signer(path)


def test_what_is_no_signing_key_is_refused_without_quoting_it(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    key = Ed25519PrivateKey.generate()
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    curve = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    contents = [b"", b"s3cret-and-not-a-key", os.urandom(100), key.private_bytes_raw(), locked, curve]
    for content in contents:
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"is not a.* key.*anabranch weights keygen") as caught:
            load_signer(path)
        assert "s3cret" not in str(caught.value)
        assert caught.value.exit_code == 78
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_signer(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_signer(tmp_path)
