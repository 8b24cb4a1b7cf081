"""Anabranch: asynchronous off-policy RL for language models over regions that share only a network."""

__version__ = "0.1.0"
