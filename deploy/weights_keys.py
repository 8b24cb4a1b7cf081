"""`anabranch weights keygen`, and what a manifest's signature is worth, in words and as a check.

Invariant: with trusted keys a manifest passes only as it would pass with a follower; without, a signature that is there
must be that of the manifest. Held by tests/unit/deploy/test_weights_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.schemas.errors import AnabranchError, ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.transport.signing import Verifier, write_key_pair


def keygen(path: Path) -> str:
    """Write a new private key to `path`; returns what to do with it, in words. Raises ConfigError as `write_key_pair`."""
    public = write_key_pair(path)
    return (
        f"wrote {path}: the private key, for the learner's node alone\n\npublic key {public}\n\n"
        f'learner:    [channel]\n            signing_key_file = "{path.absolute()}"\n'
        f'producers:  [channel]\n            trusted_keys = ["{public}"]'
    )


def signature_check(trusted_keys: Sequence[str]) -> Callable[[Manifest], None]:
    """A check that raises ManifestError for a manifest that is not signed as it should be."""
    verifier = Verifier(trusted_keys)

    def check(manifest: Manifest) -> None:
        if trusted_keys:
            verifier.check(manifest)
        elif manifest.signature is not None:
            _check_own(manifest)

    return check


def _check_own(manifest: Manifest) -> None:
    """Raises ManifestError unless the signature is that of the key it names."""
    assert manifest.signature is not None
    try:
        Verifier([manifest.signature.key]).check(manifest)
    except ManifestError:
        raise
    except AnabranchError as error:  # the key is 64 hex digits, but no point of the curve
        raise ManifestError(f"its signature names {manifest.signature.key}, which is not an Ed25519 key") from error


def signature_words(manifest: Manifest, trusted_keys: Sequence[str]) -> str:
    """How `manifest` is signed, and what followers with `trusted_keys` say to that."""
    if manifest.signature is None:
        return "none" + ("; channel.trusted_keys is set, so followers REFUSE it" if trusted_keys else "")
    key = manifest.signature.key
    try:
        _check_own(manifest)
    except ManifestError:
        return f"by {key}: NOT VALID, the manifest was altered or forged"
    if not trusted_keys:
        return f"by {key}: valid; channel.trusted_keys is empty, so nobody asks for it"
    if key not in trusted_keys:
        return f"by {key}: valid, but not of channel.trusted_keys: followers REFUSE it"
    return f"by {key}: valid, trusted"
