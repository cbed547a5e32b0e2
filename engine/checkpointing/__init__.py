"""Activation checkpointing. A policy is a tree over a model's blocks; adding one adds a row to `policies.POLICIES`.

`tree`, `worth`, `chain` and `budget` are torch-free: they plan. The other modules run what is planned.
"""
