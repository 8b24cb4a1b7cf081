"""Whatever happens to an entry on its way, `open_envelope` returns the sealed payload or an error by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.envelope import MAX_SEQ, Envelope, open_envelope
from anabranch.schemas.errors import EnvelopeError, SchemaVersionError, WireError

LIMIT = 1000
PRODUCERS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=200)
ENVELOPES = st.builds(Envelope, PRODUCERS, st.integers(0, MAX_SEQ), st.integers(0, 2**62), st.binary(max_size=LIMIT))


def wire(envelope: Envelope) -> dict[bytes, bytes]:
    """The fields as Redis hands them back."""
    return {name.encode(): value for name, value in envelope.seal().items()}


def sealed() -> dict[bytes, bytes]:
    return wire(Envelope("east-1", 7, 42, b"payload"))


@given(ENVELOPES)
def test_round_trip(envelope: Envelope) -> None:
    assert open_envelope(wire(envelope), max_entry_bytes=LIMIT) == envelope


@given(ENVELOPES, st.data())
def test_a_flipped_payload_bit_is_noticed(envelope: Envelope, data: st.DataObject) -> None:
    fields = wire(envelope)
    payload = bytearray(fields[b"payload"])
    if not payload:
        return
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EnvelopeError, match="checksum mismatch"):
        open_envelope({**fields, b"payload": bytes(payload)}, max_entry_bytes=LIMIT)


@given(ENVELOPES, st.data())
def test_mutated_fields_never_crash_and_never_change_the_payload(envelope: Envelope, data: st.DataObject) -> None:
    fields = wire(envelope)
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        if data.draw(st.booleans()):
            fields.pop(name, None)
        else:
            fields[name] = data.draw(st.binary(max_size=40))
    try:
        opened = open_envelope(fields, max_entry_bytes=LIMIT)
    except WireError:
        return
    assert opened.payload == envelope.payload


@pytest.mark.parametrize("name", ["producer", "seq", "group", "size", "xxh3", "payload"])
def test_a_missing_field_is_named(name: str) -> None:
    fields = sealed()
    del fields[name.encode()]
    with pytest.raises(EnvelopeError, match=name):
        open_envelope(fields, max_entry_bytes=LIMIT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seq", b"-1"), ("group", b"-1"), ("seq", b"1.5"), ("group", b"9" * 5000), ("seq", b""), ("producer", b"\xff"),
     ("seq", b"1000000000000000"), ("producer", b""), ("producer", b"a b"), ("producer", b"p" * 201), ("producer", b"\xe2\x80\xae")],
)  # fmt: skip
def test_unreadable_fields_are_refused(field: str, value: bytes) -> None:
    with pytest.raises(EnvelopeError) as refused:
        open_envelope({**sealed(), field.encode(): value}, max_entry_bytes=LIMIT)
    assert len(str(refused.value)) < 500, "a cause that is kept"


@pytest.mark.parametrize(
    "version", [b"2", b"2.0", b"0.9", b"10", b"", b"\xff", b"01", b"1.", b"1.01", b"1.2.3", b"1\n"]
)
def test_another_version_is_refused_by_name(version: bytes) -> None:
    named = version.decode("ascii", "replace")
    with pytest.raises(SchemaVersionError, match=rf"version {re.escape(named)}; this program reads 1 and 1\.x"):
        open_envelope({**sealed(), b"v": version}, max_entry_bytes=LIMIT)


@pytest.mark.parametrize("version", [b"1", b"1.0", b"1.1", b"1.12"])
def test_a_minor_version_is_read_and_what_it_adds_is_not_looked_at(version: bytes) -> None:
    added = {b"v": version, b"trace": b"x", b"codec": b"\xff"}
    assert open_envelope({**sealed(), **added}, max_entry_bytes=LIMIT) == Envelope("east-1", 7, 42, b"payload")


@pytest.mark.parametrize("view", [memoryview(b"xpayloadx")[1:-1], memoryview(bytearray(b"payload"))])
def test_a_view_is_sealed_as_its_bytes_are(view: memoryview) -> None:
    fields = Envelope("east-1", 7, 42, view).seal()
    assert {name.encode(): bytes(value) for name, value in fields.items()} == sealed()
    assert fields["payload"] is view, "not copied"


def test_an_entry_without_a_version_is_refused() -> None:
    fields = sealed()
    del fields[b"v"]
    with pytest.raises(SchemaVersionError, match="none"):
        open_envelope(fields, max_entry_bytes=LIMIT)


def test_the_size_limit_counts_what_is_there_not_what_is_said() -> None:
    with pytest.raises(EnvelopeError, match="over the limit of 6"):
        open_envelope({**sealed(), b"size": b"1"}, max_entry_bytes=6)
    with pytest.raises(EnvelopeError, match="holds 7 bytes, its envelope says 8"):
        open_envelope({**sealed(), b"size": b"8"}, max_entry_bytes=LIMIT)
