"""Rules of the channel's section, and of the recorder's store: URLs of stores, options that must not hold secrets, public keys.

Invariant: a URL that passes names a whole place, so that nothing of it is dropped silently, and neither it nor an option
holds a password or a key: configurations are printed and written to run directories. No message quotes what may be secret.
Held by tests/unit/schemas/test_channel_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

_FORMS = {
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "az": "az://ACCOUNT/CONTAINER/PREFIX",
    "file": "file:///DIR",
}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}
_SECRET = re.compile(r"secret|passw|token|credential|sas|key|authorization|bearer", re.I)
_NO_SECRET = re.compile(
    r"(_file|_path|_uri|_endpoint)\Z|\A(aws_)?(server_side_encryption_|sse_)(kms_key_id|bucket_key_enabled)\Z", re.I
)
_OF_AZURE_ITSELF = ("client_", "federated_", "authority_")
_USER_IN_URL = re.compile(r"://[^/?#]*@")

# Points of small order, in every encoding of 32 bytes that a verifier may take (RFC 8032, section 5.1.3; the sign bit is
# taken off before): under them a signature can hold for any message, without a private key.
_P = 2**255 - 19
_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022  # y of two points of order 8
_SMALL_ORDER = {0, 1, _ORDER_8, _P - _ORDER_8, _P - 1, _P, _P + 1}


def check_blobs(url: str) -> None:
    """Raises ValueError unless `url` is "redis" or names a whole place in an object store or directory."""
    if url != "redis":
        check_store(url, none_of="neither redis nor one of")


def check_store(url: str, *, none_of: str = "none of") -> None:
    """Raises ValueError unless `url` names a whole place in an object store or directory."""
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in _FORMS:
        raise ValueError(f"{none_of} {', '.join(_FORMS.values())}")
    form = _FORMS[scheme]
    if _USER_IN_URL.search(url):
        raise ValueError(
            f"credentials do not belong into the URL, which is printed and kept; the form is {form}"
            + (f", and {_VARIABLES[scheme]} in the environment" if scheme in _VARIABLES else "")
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"not a usable URL; the form is {form}") from None
    if "?" in url or "#" in url:
        raise ValueError(f"no query or fragment (in a directory's name: %3F, %23); the form is {form}")
    if scheme == "file":
        if parts.netloc:
            raise ValueError(f"{parts.netloc!r} would be a host, not a directory; the form is {form}, from the root on")
        if not unquote(parts.path).strip("/"):
            raise ValueError(f"it names no directory; the form is {form}")
    elif not parts.netloc:
        raise ValueError(f"it names no {'account' if scheme == 'az' else 'bucket'}; the form is {form}")
    elif scheme == "az" and not parts.path.strip("/"):
        raise ValueError(f"it names no container; the form is {form}")


def check_blob_options(url: str, options: Mapping[str, str], *, key: str = "channel.blob_options") -> None:
    """Raises ValueError for an option that looks like a secret; names the variable that takes it instead."""
    for name, value in options.items():
        shown = f"{key}.{name[:80]}"
        if _SECRET.search(name) and not _NO_SECRET.search(name):
            raise ValueError(
                f"{shown} looks like a secret, and this is printed and kept: set "
                f"{_variable(url.partition('://')[0], name)} in the environment instead"
            )
        if _USER_IN_URL.search(value):
            raise ValueError(
                f"{shown} has a user or password in its URL, and this is printed and kept"
                + (": set HTTPS_PROXY in the environment instead" if "proxy" in name.lower() else "")
            )


def _variable(scheme: str, name: str) -> str:
    upper = name.upper()[:80]
    if upper.startswith(("AWS_", "GOOGLE_", "AZURE_")):
        return upper
    if scheme == "az":
        return f"AZURE_{upper}" if name.lower().startswith(_OF_AZURE_ITSELF) else f"AZURE_STORAGE_{upper}"
    return f"{'GOOGLE' if scheme == 'gs' else 'AWS'}_{upper}"


def check_trusted_key(key: str) -> None:
    """Raises ValueError unless `key` has the form of an Ed25519 public key, and is none that anybody can sign for."""
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError(f"{key[:80]!r} is not an Ed25519 public key (64 hex digits; see anabranch weights keygen)")
    if int.from_bytes(bytes.fromhex(key), "little") % 2**255 in _SMALL_ORDER:
        raise ValueError(f"{key} is a point of small order: anybody could sign for it; see anabranch weights keygen")
