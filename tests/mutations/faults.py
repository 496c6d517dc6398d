"""All faults, in the order in which they are tried."""

from __future__ import annotations

from faults_in_collectives import IN_COLLECTIVES
from faults_in_device_steps import IN_DEVICE_STEPS
from faults_in_front_ends import IN_FRONT_ENDS
from faults_in_launches import IN_LAUNCHES
from faults_in_pipelines import IN_PIPELINES
from faults_in_popdist import IN_POPDIST
from faults_in_poprun import IN_POPRUN
from faults_in_simulation import IN_SIMULATION
from faults_in_strategies import IN_STRATEGIES
from faults_in_timelines import IN_TIMELINES
from faults_in_torch_weights import IN_TORCH_WEIGHTS
from faults_in_weights import IN_WEIGHTS

FAULTS = (
    *(*IN_COLLECTIVES, *IN_SIMULATION, *IN_STRATEGIES, *IN_PIPELINES, *IN_FRONT_ENDS, *IN_POPDIST, *IN_POPRUN),
    *(*IN_TIMELINES, *IN_DEVICE_STEPS, *IN_WEIGHTS, *IN_TORCH_WEIGHTS, *IN_LAUNCHES),
)
