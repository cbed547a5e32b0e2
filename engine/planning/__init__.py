"""Planning: which configuration to run on which card. Torch-free, on the closed form alone."""

from engine.planning.candidates import Candidate, Limits, judge, limits
from engine.planning.frontier import knee, pareto
from engine.planning.largest import largest_micro_batch, largest_seq
from engine.planning.planner import OBJECTIVES, Objective, Plan, plan

__all__ = [
    "OBJECTIVES",
    "Candidate",
    "Limits",
    "Objective",
    "Plan",
    "judge",
    "knee",
    "largest_micro_batch",
    "largest_seq",
    "limits",
    "pareto",
    "plan",
]
