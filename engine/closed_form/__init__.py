"""Closed form: what a spec costs, from tables and arithmetic alone. No torch, under a millisecond.

`predict` is the whole interface. See docs/formulas.md for the tables and their sources.
"""

from engine.closed_form.predict import predict

__all__ = ["predict"]
