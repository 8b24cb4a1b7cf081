from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from anabranch.deploy.dead_letter_show import Shown, as_json, examine, render, save_payload
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory import encode_group, read_batch
from tests.groups import entry, group, rollout
from tests.unit.deploy.letter_boxes import HOSTILE, RUN, Box, sealed

LIMIT = 2**20


def look(fields: dict[bytes, bytes], cause: str = "because") -> Shown:
    box = Box()
    letter = box.letters.get(box.put(cause, fields))
    assert letter is not None
    return examine("east", letter, run=RUN, max_entry_bytes=LIMIT)


def test_a_good_entry_is_shown_whole():
    shown = render(look(sealed(entry(7, producer="east-0-aa")), "delivered 33 times without being settled"))
    assert "delivered 33 times" in shown
    assert "envelope: in order" in shown
    assert "payload: in order" in shown
    assert "WRONG" not in shown
    rows = [line.split() for line in shown.splitlines()[-2:]]
    assert [(row[0], row[1], row[5], row[6]) for row in rows] == [("0", "2", "e1.v0", "42"), ("1", "2", "e1.v0", "42")]


def test_a_wrong_checksum_is_told_with_the_right_one_and_the_rollouts_are_there():
    fields = sealed(entry(7), xxh3=b"00ff00ff00ff00ff")
    shown = render(look(fields))
    assert "envelope: REFUSED: checksum mismatch" in shown
    assert f"00ff00ff00ff00ff   WRONG: of this payload it is {xxhash.xxh3_64_hexdigest(fields[b'payload'])}" in shown
    assert "payload: in order" in shown


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (sealed(entry(7), v=b"9"), "envelope: REFUSED: envelope version 9"),
        (sealed(entry(7), size=b"3"), "WRONG: of this payload it is "),
        ({b"v": b"1", b"group": b"7"}, "payload: REFUSED: there is no payload"),
        ({}, "payload: REFUSED: there is no payload"),
        (sealed(entry(7, run="other")), "payload: REFUSED: payload is of run 'other', group 7"),
        (sealed(replace(entry(7), group_index=8)), "payload: REFUSED: payload is of run 'run', group 7"),
        (sealed(Envelope("p", 1, 7, b"no arrow\x00\x1b" * 40)), "00000000  6e 6f 20 61 72 72 6f 77 00 1b"),
        (sealed(Envelope("p", 1, 7, b"x" * (LIMIT + 1))), "envelope: REFUSED: entry of"),
    ],
)
def test_what_is_wrong_is_told(fields, told):
    assert told in render(look(fields))


def test_rows_that_break_a_rule_are_shown_too():
    batch = read_batch(encode_group(group(7)))
    column = batch.schema.get_field_index("logprobs")
    broken = batch.set_column(
        column, batch.schema[column], pa.array([[-1.0, float("nan")]] * 2, pa.list_(pa.float32()))
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, broken.schema) as writer:
        writer.write_batch(broken)
    looked = look(sealed(Envelope("p", 1, 7, sink.getvalue().to_pybytes())))
    shown = render(looked)
    assert "a log-prob is not finite" in shown
    assert " nan " in shown
    assert json.loads(json.dumps(as_json(looked), allow_nan=False))["rollouts"][0]["logprobs"] == [-1.0, "nan"]


def test_nothing_of_it_can_move_the_cursor_or_shows_a_password():
    evil = "\x1b[31m\u202e redis://u:s3cret@h:1 \r\n"
    hostile = replace(
        group(7, producer=evil),
        prompt_text=evil,
        answer=evil,
        rollouts=(replace(rollout(), text=evil, finish_reason="stop"),),
    )
    fields = sealed(Envelope("p", 1, 7, encode_group(hostile)), producer=HOSTILE, odd=HOSTILE) | {HOSTILE: HOSTILE}
    looked = look(fields, f"cause {evil}")
    for shown in (render(looked), json.dumps(as_json(looked), indent=2)):
        assert all(line.isprintable() for line in shown.split("\n"))
        assert "s3cret" not in shown


def test_json_has_everything():
    value = as_json(look(sealed(entry(7, producer="east-0-aa"))))
    assert (value["region"], value["group"], value["cause"]) == ("east", "7", "because")
    assert (value["envelope_refused"], value["payload_refused"], value["payload_head"]) == (None, None, None)
    assert [row["token_ids"] for row in value["rollouts"]] == [[1, 2], [1, 2]]
    assert value["fields"]["producer"] == "east-0-aa"
    value = as_json(look(sealed(Envelope("p", 1, 7, b"\x00\x01"))))
    assert (value["rollouts"], value["payload_head"], value["payload_bytes"]) == (None, "0001", 2)


def test_long_completions_are_cut_in_the_table_alone():
    text = "x" * 5000
    looked = look(
        sealed(Envelope("p", 1, 7, encode_group(replace(group(7), rollouts=(replace(rollout(), text=text),)))))
    )
    assert max(map(len, render(looked).splitlines())) < 200
    assert as_json(looked)["rollouts"][0]["text"] == text


def test_the_payload_is_saved_as_it_is(tmp_path):
    fields = sealed(entry(7), xxh3=b"0")
    target = tmp_path / "entry.arrow"
    assert save_payload(look(fields), target) == len(fields[b"payload"])
    assert target.read_bytes() == fields[b"payload"]
    assert np.array_equal(read_batch(target.read_bytes()).column("reward").to_pylist(), [0.0, 1.0])
    with pytest.raises(UsageError, match="exists; give the payload another name"):
        save_payload(look(fields), target)
    with pytest.raises(UsageError, match="has no payload"):
        save_payload(look({b"v": b"1"}), tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["entry.arrow"]
