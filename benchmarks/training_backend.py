"""A backend for `popdist.registerBackend`: MPI, with the mechanism that `train_step.py --strategy-mechanism` names."""

from __future__ import annotations

import os
from dataclasses import replace

import mpi4py

import collectives
from popdist import Instance


def connect(settings: collectives.Settings, instance: Instance) -> collectives.Communicator:
    mpi4py.rc.finalize = False  # popdist finalises MPI
    return collectives.connect("mpi", replace(settings, mechanism=os.environ["TRAIN_STEP_MECHANISM"]))
