"""The bugs to plant in the core, each one operator on one function."""

from __future__ import annotations

from simulation.mutations import Bug
from simulation.planted_block_bugs import BLOCK_BUGS
from simulation.planted_planner_bugs import PLANNER_BUGS
from simulation.planted_queue_bugs import QUEUE_BUGS
from simulation.planted_request_bugs import REQUEST_BUGS
from simulation.planted_result_bugs import RESULT_BUGS
from simulation.planted_scheduler_bugs import SCHEDULER_BUGS
from simulation.planted_state_bugs import STATE_BUGS
from simulation.planted_swap_bugs import SWAP_BUGS

_TABLES = (BLOCK_BUGS, PLANNER_BUGS, QUEUE_BUGS, REQUEST_BUGS, RESULT_BUGS, SCHEDULER_BUGS, STATE_BUGS, SWAP_BUGS)
BUGS = [
    Bug(title, function, operator)
    for table in _TABLES
    for function, bugs in table.items()
    for title, operator in bugs.items()
]
