"""The bugs to plant in the core, each one operator on one function."""

from __future__ import annotations

from simulation.planted_adapter_bugs import ADAPTER_BUGS
from simulation.planted_block_bugs import BLOCK_BUGS
from simulation.planted_cadence_bugs import CADENCE_BUGS
from simulation.planted_constraint_bugs import CONSTRAINT_BUGS
from simulation.planted_copy_bugs import COPY_BUGS
from simulation.planted_draft_bugs import DRAFT_BUGS
from simulation.planted_output_bugs import OUTPUT_BUGS
from simulation.planted_policy_bugs import POLICY_BUGS
from simulation.planted_queue_bugs import QUEUE_BUGS
from simulation.planted_result_bugs import RESULT_BUGS
from simulation.planted_sibling_bugs import SIBLING_BUGS
from simulation.planted_worker_bugs import WORKER_BUGS

_ROW_BUGS = *BLOCK_BUGS, *COPY_BUGS, *DRAFT_BUGS, *OUTPUT_BUGS
_REQUEST_BUGS = *ADAPTER_BUGS, *CADENCE_BUGS, *CONSTRAINT_BUGS, *SIBLING_BUGS
BUGS = (*_REQUEST_BUGS, *_ROW_BUGS, *RESULT_BUGS, *QUEUE_BUGS, *POLICY_BUGS, *WORKER_BUGS)
