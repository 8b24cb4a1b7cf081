"""A small recorded run for tests: two regions, two epochs, drops of several kinds, hostile text, step records, versions, metrics.

index  id               what became of it
0      east/east-0-ab/1 trained in step 1 (epoch 1)
1      east/east-0-ab/2 dropped:zero_variance in step 1
2      east/east-0-ab/3 dropped:age
3      west/west-0-cd/1 trained in step 2 (epoch 2); a swap in the middle; hostile text
4      west/west-0-cd/2 no fate yet
5      east/east-0-ab/4 dropped:duplicate; its second attempt west/west-0-cd/3 was trained in step 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.schemas.config import RunConfig, dump_toml
from anabranch.schemas.fates import CONSUMED, FateRecord
from anabranch.schemas.metrics import EvaluationRecord, NoteRecord
from anabranch.schemas.trajectory import Group, Rollout, encode_group, read_batch
from anabranch.schemas.version_record import VersionRecord
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.metrics_log import MetricsLog
from tests.step_records import facts, row, write_record

T0_MS = 1_767_225_600_000  # 2026-01-01 00:00:00 UTC
HOSTILE = "\x1b[31m<script>alert('x')</script>\r\n\u202eevil'; DROP TABLE trajectories; --\t%s"
PRODUCERS = {"east": "east-0-ab", "west": "west-0-cd"}


FIRST = PolicyVersion(1, 0)


@dataclass(frozen=True)
class Made:
    """A group of the run. `fate`: "" for none; `policy`: that its step began with, or at which it was dropped."""

    index: int
    region: str
    seq: int
    fate: str
    policy: PolicyVersion
    sampled: PolicyVersion = FIRST
    swapped: PolicyVersion | None = None
    rewards: tuple[float, ...] = (0.0, 1.0)
    text: str = "42"
    attempt: int = 0
    timed: bool = True  # False: by programs that kept fewer times

    @property
    def entry_id(self) -> str:
        return f"{T0_MS + 10_000 + 1_000 * self.index}-{self.attempt}"

    def group(self) -> Group:
        spans = [VersionSpan(self.sampled, 0)]
        if self.swapped is not None:
            spans.append(VersionSpan(self.swapped, 2))
        rollouts = tuple(
            Rollout(
                sample_index=sample,
                token_ids=np.array([7, 8 + sample, 9], np.int32),
                logprobs=np.array([-0.5, -1.25, -2.0], np.float32),
                spans=tuple(spans),
                reward=reward,
                finish_reason="stop",
                text=f"{self.text}{sample}",
                started_ms=T0_MS + 1_000 * self.index,
                finished_ms=T0_MS + 1_000 * self.index + 500 + sample,
                scored_ms=self._at(600 + sample),
            )
            for sample, reward in enumerate(self.rewards)
        )
        producer = PRODUCERS[self.region]
        return Group(
            "run",
            self.region,
            producer,
            self.index,
            self.attempt,
            np.array([5, 6], np.int32),
            f"{self.index} + 1 =",
            "43",
            rollouts,
            permit_ms=self._at(-100),
            spooled_ms=self._at(700),
        )

    def _at(self, ms: int) -> int:
        return T0_MS + 1_000 * self.index + ms if self.timed else 0

    def batch(self) -> pa.RecordBatch:
        return read_batch(encode_group(self.group()))

    def record(self) -> FateRecord:
        age = self.policy.version - self.sampled.version
        return FateRecord(
            region=self.region, producer=PRODUCERS[self.region], seq=self.seq, group_index=self.index, attempt=self.attempt,
            fate=self.fate, epoch=self.policy.epoch, version=self.policy.version, age=age, rollouts=len(self.rewards),
            tokens=3 * len(self.rewards), cut=0, reward=sum(self.rewards) / len(self.rewards), time_ms=T0_MS + 60_000 + self.index,
            delivered_ms=self._at(20_000) or None,
            admitted_ms=(self._at(20_100) or None) if self.fate in CONSUMED else None,
        )  # fmt: skip


E1, E2 = PolicyVersion(1, 0), PolicyVersion(2, 1)
GROUPS = (
    Made(0, "east", 1, "trained", E1),
    Made(1, "east", 2, "dropped:zero_variance", E1, rewards=(1.0, 1.0)),
    Made(2, "east", 3, "dropped:age", PolicyVersion(2, 9)),
    Made(3, "west", 1, "trained", E2, swapped=PolicyVersion(2, 1), text=HOSTILE),
    Made(4, "west", 2, "", E2, sampled=E2),
    Made(5, "east", 4, "dropped:duplicate", E2),
    Made(5, "west", 3, "trained", E2, sampled=E2, attempt=1, rewards=(0.0, 0.25)),
)


def write_run(directory: Path, groups: Sequence[Made] = GROUPS, *, steps: bool = True, rows_per_file: int = 2) -> Path:
    """The run in `directory`, made new."""
    directory.mkdir(parents=True)
    write_recorded(directory, groups, rows_per_file=rows_per_file)
    write_fates(directory, groups)
    log = MetricsLog(directory)
    log.append(NoteRecord(time_ms=T0_MS, what="started", detail={"steps": 2}))
    log.append(
        EvaluationRecord(
            time_ms=T0_MS,
            epoch=1,
            version=0,
            prompts=4,
            mean_reward=0.5,
            standard_error=0.1,
            temperature=1.0,
            seconds=1.0,
        )
    )
    log.close()
    versions = [VersionRecord(time_ms=T0_MS + v, epoch=e, version=v, kind="anchor", label="anchor", payload_bytes=10, full_bytes=20, changed_fraction=1.0, result_digest="ab") for e, v in ((1, 0), (1, 1), (2, 1))]  # fmt: skip
    (directory / "versions.jsonl").write_bytes(b"".join(v.line() for v in versions))
    config = RunConfig.model_validate(
        {"run": {"name": directory.name, "dir": str(directory.parent)}, "regions": {"east": {}, "west": {}}}
    )
    (directory / "resolved.toml").write_text(dump_toml(config))
    if steps:
        write_steps(directory, groups)
    return directory


def write_recorded(directory: Path, groups: Sequence[Made], *, rows_per_file: int = 2) -> None:
    """Files of the layout without partitions, as recorders before them left; so many groups in a file."""
    for region in PRODUCERS:
        mine = [one for one in groups if one.region == region]
        folder = directory / "trajectories" / f"region={region}"
        folder.mkdir(parents=True, exist_ok=True)
        for at in range(0, len(mine), rows_per_file):
            part = mine[at : at + rows_per_file]
            tables = []
            for one in part:
                rows = pa.Table.from_batches([one.batch()]).drop_columns(["region"]).replace_schema_metadata(None)
                for name, value, kind in (("entry_id", one.entry_id, pa.string()), ("seq", one.seq, pa.int64())):
                    rows = rows.append_column(name, pa.array([value] * rows.num_rows, kind))
                tables.append(rows)
            ids = sorted(one.entry_id for one in part)
            pq.write_table(pa.concat_tables(tables), folder / f"{ids[0]}_{ids[-1]}.parquet")


def write_partitioned(directory: Path, groups: Sequence[Made], *, joined: bool, merged: bool = False) -> Path:
    """One file of the layout with partitions, all of one partition; `joined`: with what the learner logged; `merged`: as one of several."""
    tables = []
    for one in groups:
        count = len(one.rewards)
        rows = pa.Table.from_batches([one.batch()]).drop_columns(["run", "region"]).replace_schema_metadata(None)
        policies = [p for p in (one.sampled, one.swapped) if p is not None]
        trained = joined and one.fate == "trained"
        values: dict[str, tuple[object, pa.DataType]] = {
            "entry_id": (one.entry_id, pa.string()),
            "seq": (one.seq, pa.int64()),
            "tokens": (3, pa.int32()),
            "version_min": (min(p.version for p in policies), pa.int64()),
            "version_max": (max(p.version for p in policies), pa.int64()),
            "epoch_min": (min(p.epoch for p in policies), pa.int32()),
            "fate": (one.fate if joined and one.fate else None, pa.string()),
            "step": (one.policy.version + 1 if trained else None, pa.int64()),
            "weight": (0.125 if trained else None, pa.float64()),
            "learner_logprobs": ([-1.0, -1.0, -1.0] if trained else None, pa.list_(pa.float32())),
        }
        for name, (value, kind) in values.items():
            rows = rows.append_column(name, pa.array([value] * count, kind))
        tables.append(rows)
    ids = sorted(one.entry_id for one in groups)
    epoch = max(max(one.sampled.epoch, one.swapped.epoch if one.swapped else 0) for one in groups)
    folder = directory / "trajectories" / "run=run" / f"epoch={epoch}" / "day=2026-01-01" / f"region={groups[0].region}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{ids[0]}_{ids[-1]}{'.merged' if merged else ''}.parquet"
    pq.write_table(pa.concat_tables(tables), path.with_suffix(".tmp"))
    return path.with_suffix(".tmp").rename(path)


def write_fates(directory: Path, groups: Sequence[Made]) -> None:
    (directory / "fates").mkdir(exist_ok=True)
    lines = [one.record().line() for one in groups if one.fate]
    (directory / "fates" / "000001.jsonl").write_bytes(b"".join(lines) + b'{"region": "torn')


def write_steps(directory: Path, groups: Sequence[Made] = GROUPS) -> None:
    for policy in sorted({one.policy for one in groups if one.fate in ("trained", "dropped:zero_variance")}):
        mine = [one for one in groups if one.policy == policy and one.fate in ("trained", "dropped:zero_variance")]
        base = facts(epoch=policy.epoch, version_before=policy.version, step=policy.version + 1, now=str(policy))
        named = [
            base.groups[0].model_copy(update={"region": g.region, "producer": PRODUCERS[g.region], "seq": g.seq, "group_index": g.index, "attempt": g.attempt})
            for g in mine
        ]  # fmt: skip
        made = base.model_copy(update={"groups": named})
        rows = []
        for one, group in zip(mine, named, strict=True):
            for sample, reward in enumerate(one.rewards):
                flat = one.fate != "trained"
                nothing = dict.fromkeys(
                    (
                        "advantage",
                        "weight",
                        "ratio_mean",
                        "ratio_max",
                        "kept_fraction",
                        "loss_share",
                        "logprob",
                        "entropy",
                        "factor",
                        "kept",
                    )
                )
                lists = {
                    "logprob": [-0.5, -1.0, -2.5],
                    "entropy": [1.0, 2.0, 0.5],
                    "factor": [1.0, 0.75, 0.0],
                    "kept": [True, True, False],
                }
                values = {"tokens": 3, "advantage": reward - 0.5, "ratio_max": 1.5} | lists | (nothing if flat else {})
                rows.append(row(len(rows), group, sample, **values))
        write_record(directory, made, rows)


def changed(one: Made, **changes: object) -> Made:
    return replace(one, **changes)
