"""Ed25519 signatures on manifests, so that whoever holds a regional Redis or a bucket cannot inject weights.

Invariant: a signature covers every field of a manifest but itself: run, epoch, version, base, layout, result digest and
the digest of each chunk. With trusted keys configured, a manifest passes only if one of them has signed it.
Held by tests/unit/transport/test_signing.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.manifest import Manifest, Signature
from anabranch.transport.files import sync_directory

MAX_KEY_FILE_BYTES = 65536


class Signer:
    """Signs with one private key; `public_key` is what producers put into `channel.trusted_keys`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw().hex()

    def sign(self, manifest: Manifest) -> Manifest:
        """`manifest` with a signature of this key, in place of any other."""
        signature = Signature(key=self.public_key, signature=self._key.sign(manifest.signed_bytes()).hex())
        return manifest.model_copy(update={"signature": signature})


class Verifier:
    """Args:
    trusted_keys: public keys, 64 hex digits each; none: everything passes, signed or not.
    """

    def __init__(self, trusted_keys: Iterable[str]) -> None:
        self._keys: dict[str, Ed25519PublicKey] = {}
        for key in trusted_keys:
            try:
                self._keys[key.lower()] = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            except ValueError as error:
                raise ConfigError(f"{key[:80]!r} in channel.trusted_keys is not an Ed25519 public key") from error

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestError unless a trusted key has signed `manifest`, or no keys are configured."""
        if not self._keys:
            return
        about = f"{manifest.label} {manifest.policy} of run {manifest.run!r} refused: "
        if manifest.signature is None:
            raise ManifestError(
                f"{about}it is not signed, and channel.trusted_keys is set; set channel.signing_key_file on the learner"
            )
        key = self._keys.get(manifest.signature.key)
        if key is None:
            raise ManifestError(
                f"{about}it is signed by {manifest.signature.key}, which is not in channel.trusted_keys"
            )
        try:
            key.verify(bytes.fromhex(manifest.signature.signature), manifest.signed_bytes())
        except InvalidSignature:
            raise ManifestError(
                f"{about}its signature by {manifest.signature.key} is not of this manifest: it was altered"
            ) from None


def load_signer(path: Path) -> Signer:
    """The private key in `path`, as `write_key_pair` writes it (PEM, PKCS 8, no passphrase).

    Raises ConfigError if it cannot be read, holds something else, or may be read by others than its owner.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"the signing key {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXO if _is_credential(path) else stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the signing key {path} is open to others (mode {stat.S_IMODE(mode):03o}); chmod 600 it, and make a new "
            "one if somebody may have read it"
        )
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError):  # not PEM, or with a passphrase; what cryptography says may quote the file
        raise ConfigError(
            f"the signing key {path} is not a private key in PEM without a passphrase; make one with: "
            "anabranch weights keygen"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the signing key {path} is not an Ed25519 key; make one with: anabranch weights keygen")
    return Signer(key)


def _is_credential(path: Path) -> bool:
    """Whether systemd gave us the file: it lets the service's user in by an ACL, which shows as a right of the group."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return folder is not None and path.absolute().is_relative_to(folder)


def write_key_pair(path: Path) -> str:
    """Write a new private key to `path`, readable by its owner only; returns the public key, hex.

    Raises ConfigError if something is there already or the file cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists; a signing key is not overwritten: move it away first") from None
    except OSError as error:
        raise ConfigError(f"the signing key {path} cannot be written: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.absolute().parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"the signing key {path} cannot be written: {error.strerror}") from None
    return Signer(key).public_key
