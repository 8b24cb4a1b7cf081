"""Fate records for tests."""

from __future__ import annotations

from anabranch.schemas.fates import FateRecord


def record(**changes: object) -> FateRecord:
    fields = {
        "region": "east", "producer": "east-0-ab", "seq": 4, "group_index": 9, "attempt": 0, "fate": "trained", "epoch": 1,
        "version": 3, "age": 2, "rollouts": 8, "tokens": 100, "cut": 1, "reward": 0.25, "time_ms": 1,
        "delivered_ms": None, "admitted_ms": None,
    }  # fmt: skip
    return FateRecord.model_validate(fields | changes)
