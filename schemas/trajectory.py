"""The trajectory schema: one Arrow record batch per group, one row per rollout.

Invariant: a `Group` that `decode_group` returns is well formed. Every rollout has at least one token, one
log-prob per token, spans that start at 0 and ascend inside the completion, and finite numbers; NaN log-probs
or rewards are refused here, at ingest, and never reach the loss. Held by tests/unit/schemas/test_trajectory.py.

Version rule: the schema's metadata carries `major.minor`. A reader takes any minor of its own major (added
columns are ignored) and refuses another major by name. 1.1 added `group_size`; a batch of 1.0 holds whole groups. 1.2
added `permit_ms`, `scored_ms` and `spooled_ms`, which are 0 (not known) in older ones.
"""

from anabranch.schemas.trajectory_batch import read_batch
from anabranch.schemas.trajectory_codec import decode_group, encode_group, stamp_spooled
from anabranch.schemas.trajectory_schema import SCHEMA, SCHEMA_MAJOR, SCHEMA_MINOR, SPAN, Group, Rollout

__all__ = [
    "SCHEMA", "SCHEMA_MAJOR", "SCHEMA_MINOR", "SPAN", "Group", "Rollout", "decode_group", "encode_group", "read_batch",
    "stamp_spooled",
]  # fmt: skip
