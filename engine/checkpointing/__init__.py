"""Activation checkpointing: each policy is a tree over a model's blocks. Adding one is adding a row to `POLICIES`."""

from engine.checkpointing.policies import POLICIES, apply_checkpointing

__all__ = ["POLICIES", "apply_checkpointing"]
