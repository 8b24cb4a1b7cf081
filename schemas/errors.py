"""Every error this project raises on purpose, in one tree.

Invariant: each error carries the exit code that its process should end with, so that systemd (and the
demo supervisor) can tell "try again" (75) from "a person must change something" (78). An error message
says what happened, where, and what to do; it never contains a secret (`redact_url`).

    AnabranchError                  70  internal: a bug or a broken invariant
    ├── UsageError                   2  the command line is wrong
    ├── ConfigError                 78  the configuration is wrong: restarting will not help
    │   ├── UnsafeSamplingError         behaviour log-probs would not be those of the sampled distribution
    │   ├── ModelMismatchError          the model does not fit the weights on the channel
    │   └── RewardError                 a scorer failed or gave no finite number: it would do so again
    ├── TemporaryError              75  the world is wrong for now: restart later
    │   ├── DeadlineError               a wait reached its deadline; names what it waited for
    │   ├── StreamUnavailableError      a Redis cannot be reached
    │   ├── BackpressureError           a Redis is full; nothing was lost
    │   └── FateLogError                the fates of groups cannot be written (full disk, or another learner has them)
    ├── WireError                   76  bytes from the wire break their contract
    │   ├── EnvelopeError               a stream entry is malformed or its checksum is wrong
    │   ├── SchemaVersionError          an unknown major schema version
    │   ├── TrajectoryError             a trajectory breaks a rule of its schema (non-finite number, lengths)
    │   ├── SpoolError                  a file of a producer's spool is damaged
    │   ├── StepRecordError             the record of a step is torn or foreign
    │   ├── AppendOnlyFileError         a server's append-only file is damaged, and not by holes
    │   ├── ManifestError               a weight manifest is malformed
    │   └── DeltaError                  a weight payload is malformed, or its base or result digest is wrong
    ├── CheckpointError             78  a checkpoint is torn, foreign or missing
    └── GateError                   78  a step's figures are out of the bounds of [gates]: a person must look
"""

from __future__ import annotations

import re

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_TEMPORARY = 75
EXIT_PROTOCOL = 76
EXIT_CONFIG = 78
_QUERY_PASSWORD = re.compile(r"(?i)(password=)[^&#\s]*")


class AnabranchError(Exception):
    """Root of the tree; `exit_code` is what a process that dies of it returns."""

    exit_code = EXIT_INTERNAL


class UsageError(AnabranchError, ValueError):
    exit_code = EXIT_USAGE


class ConfigError(AnabranchError, ValueError):
    exit_code = EXIT_CONFIG


class UnsafeSamplingError(ConfigError):
    pass


class ModelMismatchError(ConfigError):
    pass


class RewardError(ConfigError):
    pass


class TemporaryError(AnabranchError, RuntimeError):
    exit_code = EXIT_TEMPORARY


class DeadlineError(TemporaryError, TimeoutError):
    """A wait reached its deadline. Build it with `DeadlineError.waiting_for`."""

    @classmethod
    def waiting_for(cls, what: str, after_s: float, hint: str = "") -> DeadlineError:
        return cls(f"gave up after {after_s:.1f} s waiting for {what}" + (f"; {hint}" if hint else ""))


class StreamUnavailableError(TemporaryError, ConnectionError):
    pass


class BackpressureError(TemporaryError):
    pass


class FateLogError(TemporaryError):
    pass


class WireError(AnabranchError, ValueError):
    exit_code = EXIT_PROTOCOL


class EnvelopeError(WireError):
    pass


class SchemaVersionError(WireError):
    pass


class TrajectoryError(WireError):
    pass


class SpoolError(WireError):
    pass


class StepRecordError(WireError):
    pass


class AppendOnlyFileError(WireError):
    pass


class ManifestError(WireError):
    pass


class DeltaError(WireError):
    pass


class CheckpointError(AnabranchError, RuntimeError):
    exit_code = EXIT_CONFIG


class GateError(AnabranchError, RuntimeError):
    exit_code = EXIT_CONFIG


def redact_url(url: str) -> str:
    """`url` with its password replaced by `***`, fit for logs, errors and files.

    Works on text that is no valid URL too (no scheme, a bad port, a password that is not percent-encoded): all between
    the user's colon and the last @ is hidden, and so is a `password=` in the query.
    """
    head, at, tail = url.rpartition("@")
    scheme, slashes, userinfo = head.partition("://") if "://" in head else ("", "", head)
    user, colon, _ = userinfo.partition(":")
    if at and colon:
        head = f"{scheme}{slashes}{user}:***"
    return _QUERY_PASSWORD.sub(r"\1***", head + at + tail)
