"""Configuration: frozen models (`models`, and a module for each larger section) and how they are built (`load`)."""

from anabranch.schemas.config.channel import ChannelSection
from anabranch.schemas.config.correction import CorrectionSection, GateSection
from anabranch.schemas.config.delivery import LedgerSection, RecorderSection, SpoolSection, StreamSection
from anabranch.schemas.config.learner import LearnerSection
from anabranch.schemas.config.load import ENV_PREFIX, dump_json, dump_toml, load_config
from anabranch.schemas.config.models import (
    ModelSection,
    ProducerSection,
    RedisSection,
    RegionSection,
    RunConfig,
    RunSection,
    SamplingSection,
    TaskSection,
)

__all__ = [
    "ENV_PREFIX", "ChannelSection", "CorrectionSection", "GateSection", "LearnerSection", "LedgerSection", "ModelSection", "ProducerSection",
    "RecorderSection", "RedisSection", "RegionSection", "RunConfig", "RunSection", "SamplingSection", "SpoolSection",
    "StreamSection", "TaskSection", "dump_json", "dump_toml", "load_config",
]  # fmt: skip
