"""The record of one executed step, which the client receives from the server."""

from lineclear.client.step_record import RowKind, StepRecord, StepRow

__all__ = ["RowKind", "StepRecord", "StepRow"]
