"""Where and when the parts of a flow run: a pure function of what they cost and what there is to run them on."""

from rlix.flow.planner.graph import Component, Edge, Graph
from rlix.flow.planner.plan import LoopPlan, Mode, PartPlan, Plan, Planned, SegmentPlan, StagePlan
from rlix.flow.planner.search import make_plan
from rlix.flow.planner.tables import Point, Table

__all__ = [
    "Component",
    "Edge",
    "Graph",
    "LoopPlan",
    "Mode",
    "PartPlan",
    "Plan",
    "Planned",
    "Point",
    "SegmentPlan",
    "StagePlan",
    "Table",
    "make_plan",
]
