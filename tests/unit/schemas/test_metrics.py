from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from anabranch.schemas.metrics import AnyRecord, EvaluationRecord, LearnerStatus, NoteRecord, ProducerStatus, StepRecord

ANY = TypeAdapter(AnyRecord)


def step_record(**changes: object) -> StepRecord:
    fields: dict[str, object] = {
        name: 1 for name, field in StepRecord.model_fields.items() if field.is_required() and name != "age_tokens"
    }
    return StepRecord.model_validate({**fields, "age_tokens": {0: 5, 3: 7}, **changes})


def test_records_are_told_apart_by_their_event() -> None:
    evaluation = EvaluationRecord(
        time_ms=1, epoch=1, version=2, prompts=3, mean_reward=0.5, standard_error=0.1, temperature=1.0, seconds=2.0
    )
    note = NoteRecord(time_ms=1, what="started", detail={"epoch": 1, "why": None, "ok": True})
    for record in (step_record(), evaluation, note):
        assert ANY.validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_of_numbers_gone_wrong_can_still_be_read(value: float) -> None:
    """The step whose loss is NaN is the one line somebody will look for; and every line is JSON for any parser."""
    text = step_record(loss=value, kl_k3_same_version=value).model_dump_json()
    assert "NaN," not in text
    back = ANY.validate_json(text)
    assert isinstance(back, StepRecord)
    assert str(back.loss) == str(value) == str(back.kl_k3_same_version)


def test_ages_keep_their_integer_keys() -> None:
    back = ANY.validate_json(step_record().model_dump_json())
    assert isinstance(back, StepRecord)
    assert back.age_tokens == {0: 5, 3: 7}


def test_fields_of_a_newer_version_are_ignored_and_missing_ones_are_not() -> None:
    newer = '{"event": "note", "time_ms": 1, "what": "x", "added": 5}'
    assert ANY.validate_json(newer) == NoteRecord(time_ms=1, what="x")
    with pytest.raises(ValidationError):
        ANY.validate_json('{"event": "note", "time_ms": 1}')
    with pytest.raises(ValidationError):
        ANY.validate_json('{"event": "unknown", "time_ms": 1}')


def test_status_lines_round_trip() -> None:
    learner = LearnerStatus(updated_ms=1, state="waiting", step=1, steps_total=2, epoch=1, version=1)
    assert LearnerStatus.model_validate_json(learner.model_dump_json()) == learner
    producer = ProducerStatus(updated_ms=1, region="east", pid=5, state="sampling", policy="e1.v2")
    assert ProducerStatus.model_validate_json(producer.model_dump_json()) == producer
