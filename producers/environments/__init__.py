"""Environments: where problems come from and how an answer becomes a reward."""

from anabranch.producers.environments.base import Environment, Problem
from anabranch.producers.environments.reasoning_gym import Task

__all__ = ["Environment", "Problem", "Task"]
