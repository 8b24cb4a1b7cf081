from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from anabranch.schemas.config import load_config
from anabranch.schemas.config.channel_rules import check_blobs
from anabranch.schemas.config.load import dump_json, dump_toml
from anabranch.schemas.errors import ConfigError


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("", overrides=overrides)
    assert caught.value.exit_code == 78
    return str(caught.value)


@pytest.mark.parametrize("url", [
    "redis", "s3://bucket", "s3://bucket/a/b", "gs://bucket/p", "az://account/container", "az://account/container/p",
    "file:///dir", "file:///a%20b/c", "s3://bucket/a@b",
])  # fmt: skip
def test_a_whole_place_is_taken(url):
    assert load_config("", overrides=[f"channel.blobs={url}"]).channel.blobs == url


@pytest.mark.parametrize(("url", "message"), [
    ("file://relative/x", "'relative' would be a host, not a directory; the form is file:///DIR"),
    ("file:///", "names no directory"),
    ("file:relative", "neither redis nor one of s3://BUCKET/PREFIX"),
    ("/dir", "neither redis nor one of"),
    ("ftp://h/x", "neither redis nor one of"),
    ("az://account", "names no container"),
    ("az://account/", "names no container"),
    ("az:///c", "names no account"),
    ("s3://", "names no bucket"),
    ("s3:///p", "names no bucket"),
    ("gs:///p", "names no bucket"),
    ("s3://b/p?x=1", "no query"),
    ("file:///a#b", "no query or fragment"),
])  # fmt: skip
def test_half_a_place_is_refused_at_configuration(url, message):
    text = refused(f"channel.blobs={url}")
    assert text.startswith("channel.blobs (--set channel.blobs): ")
    assert message in text


@pytest.mark.parametrize(("url", "variable"), [
    ("s3://k:s3cret@bucket/x", "AWS_SECRET_ACCESS_KEY"),
    ("s3://s3cret@bucket/x", "AWS_SECRET_ACCESS_KEY"),
    ("gs://s3cret@bucket/x", "GOOGLE_SERVICE_ACCOUNT"),
    ("az://a:s3cret@account/c", "AZURE_STORAGE_ACCOUNT_KEY"),
    ("file://u:s3cret@h/x", "file:///DIR"),
])  # fmt: skip
def test_credentials_in_a_url_are_refused_and_not_shown(url, variable):
    text = refused(f"channel.blobs={url}")
    assert "s3cret" not in text
    assert variable in text


@pytest.mark.parametrize(("blobs", "name", "variable"), [
    ("s3://b/p", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ("s3://b/p", "secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ("s3://b/p", "AWS_Session_Token", "AWS_SESSION_TOKEN"),
    ("s3://b/p", "access_key_id", "AWS_ACCESS_KEY_ID"),
    ("s3://b/p", "aws_sse_customer_key_base64", "AWS_SSE_CUSTOMER_KEY_BASE64"),
    ("gs://b/p", "service_account_key", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    ("az://a/c", "account_key", "AZURE_STORAGE_ACCOUNT_KEY"),
    ("az://a/c", "sas_token", "AZURE_STORAGE_SAS_TOKEN"),
    ("az://a/c", "client_secret", "AZURE_CLIENT_SECRET"),
    ("redis", "password", "AWS_PASSWORD"),
])  # fmt: skip
@pytest.mark.parametrize("value", ['"s3cret"', "12345678"])
def test_an_option_that_looks_like_a_secret_is_refused_and_not_shown(blobs, name, variable, value):
    text = refused(f"channel.blobs={blobs}", f"channel.blob_options={{{name} = {value}}}")
    assert value.strip('"') not in text
    if value.startswith('"'):
        assert f"channel.blob_options.{name} looks like a secret" in text
        assert f"set {variable} in the environment" in text


def test_a_proxy_with_a_password_is_refused():
    text = refused("channel.blobs=s3://b/p", 'channel.blob_options={proxy_url = "http://u:s3cret@proxy:3128"}')
    assert "s3cret" not in text
    assert "HTTPS_PROXY" in text


def test_harmless_options_are_taken():
    names = (
        "endpoint", "region", "allow_http", "aws_sse_kms_key_id", "sse_bucket_key_enabled", "proxy_url",
        "federated_token_file", "service_account_path", "skip_signature", "account_name", "client_id",
    )  # fmt: skip
    options = ", ".join(f'{name} = "http://x"' for name in names)
    config = load_config("", overrides=["channel.blobs=s3://b/p", f"channel.blob_options={{{options}}}"])
    assert set(config.channel.blob_options) == set(names)


def test_the_recorders_store_keeps_the_same_rules():
    config = load_config("", overrides=["recorder.store=s3://b/p", 'recorder.store_options={region = "x"}'])
    assert (config.recorder.store, config.recorder.store_options) == ("s3://b/p", {"region": "x"})
    assert load_config("").recorder.store == ""
    assert "none of s3://BUCKET/PREFIX" in refused("recorder.store=redis")
    for text in (
        refused("recorder.store=s3://k:s3cret@b/p"),
        refused("recorder.store=s3://b/p", 'recorder.store_options={secret_access_key = "s3cret"}'),
    ):
        assert "s3cret" not in text
        assert "AWS_SECRET_ACCESS_KEY" in text
    assert "recorder.store_options.secret_access_key looks like a secret" in text


def test_no_password_of_a_replica_is_dumped():
    config = load_config("", overrides=["regions.eu.url=redis://h", "regions.eu.weights_url=redis://u:s3cret@h:1"])
    assert "s3cret" not in dump_toml(config) + json.dumps(dump_json(config))


def test_trusted_keys_are_public_keys_of_somebody():
    key = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    assert load_config("", overrides=[f'channel.trusted_keys=["{key}"]']).channel.trusted_keys == (key,)
    assert 'a list of Ed25519 public keys of 64 hex digits each, such as ["ab12..."]' in refused(
        "channel.trusted_keys=zz"
    )
    assert "64 hex digits; see anabranch weights keygen" in refused('channel.trusted_keys=["zz"]')


@pytest.mark.parametrize("sign", [0, 0x80])
@pytest.mark.parametrize("point", [
    "00" * 32,
    "01" + "00" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
])  # fmt: skip
def test_a_key_that_anybody_can_sign_for_is_refused(point, sign):
    key = point[:62] + f"{int(point[62:], 16) | sign:02x}"
    assert "a point of small order" in refused(f'channel.trusted_keys=["{key}"]')


def test_the_all_zero_key_would_have_been_taken_by_the_library():
    Ed25519PublicKey.from_public_bytes(bytes(32))


def test_the_rule_by_itself_names_no_secret():
    with pytest.raises(ValueError, match="credentials") as caught:
        check_blobs("s3://k:s3cret@[")
    assert "s3cret" not in str(caught.value)
