"""A simulated network: the costs of reductions on any number of hosts, measured by a virtual clock."""

from __future__ import annotations

from collectives.plans.network import Network
from collectives.simulation.run import Outcome, simulate, steady_s
from collectives.simulation.traffic import Traffic, chain, of_comparison, of_plan, ring

__all__ = ["Network", "Outcome", "Traffic", "chain", "of_comparison", "of_plan", "ring", "simulate", "steady_s"]
