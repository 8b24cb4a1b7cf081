"""The tables that a reader keeps of a run's logs: fates, steps, evaluations, notes, versions, the facts of steps.

Invariant: `schema` names the columns that the models of the logs have, and no others; what a line lacks is null. Held by
tests/unit/consumers/test_run_tables.py.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from anabranch.schemas.fates import FateRecord
from anabranch.schemas.metrics import EvaluationRecord, NoteRecord, StepRecord
from anabranch.schemas.step_record import StepFacts
from anabranch.schemas.version_record import VersionRecord

_KINDS: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def schema(model: type[BaseModel], *, without: tuple[str, ...] = ()) -> pa.Schema:
    """A column for each field of `model`; what is no number, text or bool is a string of JSON."""
    return pa.schema(
        [(name, _kind(info.annotation)) for name, info in model.model_fields.items() if name not in without]
    )


def _kind(annotation: Any) -> pa.DataType:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = inner[0] if len(inner) == 1 else None
    return _KINDS.get(annotation, pa.string())


FATES = schema(FateRecord)
STEPS = schema(StepRecord, without=("event",))
EVALUATIONS = schema(EvaluationRecord, without=("event",))
NOTES = schema(NoteRecord, without=("event",))
METRICS = pa.unify_schemas([pa.schema([("event", pa.string())]), STEPS, EVALUATIONS, NOTES])
EVENTS = {"steps": ("step", STEPS), "evaluations": ("evaluation", EVALUATIONS), "notes": ("note", NOTES)}
VERSIONS = schema(VersionRecord)
FACTS = schema(StepFacts)
