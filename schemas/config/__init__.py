"""Configuration: frozen models (`models`) and how they are built from layers (`load`)."""

from anabranch.schemas.config.load import ENV_PREFIX, dump_json, dump_toml, load_config
from anabranch.schemas.config.models import (
    ChannelSection,
    CorrectionSection,
    LearnerSection,
    ModelSection,
    ProducerSection,
    RecorderSection,
    RedisSection,
    RegionSection,
    RunConfig,
    RunSection,
    SamplingSection,
    StreamSection,
    TaskSection,
)

__all__ = [
    "ENV_PREFIX", "ChannelSection", "CorrectionSection", "LearnerSection", "ModelSection", "ProducerSection",
    "RecorderSection", "RedisSection", "RegionSection", "RunConfig", "RunSection", "SamplingSection", "StreamSection", "TaskSection",
    "dump_json", "dump_toml", "load_config",
]  # fmt: skip
