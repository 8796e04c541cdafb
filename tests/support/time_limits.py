"""How long tests wait. Nobody waits so long on a quiet machine; a busy or slow one must not look like a hang."""

from __future__ import annotations

PATIENCE_SECONDS = 120.0
"""For what must happen: a hang, and nothing else, takes longer."""
SOON_SECONDS = 60.0
"""The most for what an event brings about at once, where only a timeout that is longer still could bring it about too.

Far more than it takes: a machine may stand still for many seconds, and that is nobody's fault."""
