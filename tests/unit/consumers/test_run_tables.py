"""Tables of logs have the columns of their models."""

from __future__ import annotations

import pyarrow as pa

from anabranch.consumers.run_tables import EVENTS, FACTS, FATES, METRICS, VERSIONS
from anabranch.schemas.fates import FateRecord
from anabranch.schemas.metrics import StepRecord
from anabranch.schemas.step_record import StepFacts
from anabranch.schemas.version_record import VersionRecord


def test_each_field_is_a_column_and_nothing_else() -> None:
    assert FATES.names == list(FateRecord.model_fields)
    assert VERSIONS.names == list(VersionRecord.model_fields)
    assert FACTS.names == list(StepFacts.model_fields)
    assert EVENTS["steps"][1].names == [name for name in StepRecord.model_fields if name != "event"]
    assert {"event", *(name for _, schema in EVENTS.values() for name in schema.names)} == set(METRICS.names)


def test_numbers_are_numbers_and_the_rest_is_json() -> None:
    steps = EVENTS["steps"][1]
    assert steps.field("loss").type == pa.float64()
    assert steps.field("eta_s").type == pa.float64(), "optional numbers too"
    assert steps.field("step").type == pa.int64()
    assert steps.field("age_tokens").type == pa.string()
    assert FATES.field("seq").type == pa.int64()
    assert FACTS.field("tokens").type == pa.bool_()
    assert FACTS.field("groups").type == pa.string()
