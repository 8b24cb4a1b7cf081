"""Environments: where prompts come from and what a completion is worth."""

from anabranch.producers.environments.base import Problem
from anabranch.producers.environments.reasoning_gym import Task

__all__ = ["Problem", "Task"]
