"""Faults that make simulated networks faster or slower."""

from __future__ import annotations

from fault import Fault

IN_SIMULATION = (
    Fault(
        name="received data on a link wait for sent data",
        path="collectives/simulation/run.py",
        old="begun, carried[remote], self._into)",
        new="begun, carried[remote], self._out)",
        caught_by="tests/collectives/test_simulated_network.py::test_opposite_directions_and_different_links_are_independent",
    ),
    Fault(
        name="a rank sends before it has added",
        path="collectives/simulation/run.py",
        old="np.maximum(ready[ranks], self._busy[ranks]) + took",
        new="np.maximum(ready[ranks], self._busy[ranks])",
        caught_by="tests/collectives/test_simulated_network.py::test_a_rank_adds_before_it_sends",
    ),
)
