"""How long tests wait. Nobody waits so long on a quiet machine; a busy or slow one must not look like a hang."""

from __future__ import annotations

PATIENCE_SECONDS = 120.0
"""For what must happen: a hang, and nothing else, takes longer."""
SOON_SECONDS = 10.0
"""The most for what an event brings about at once, where only a timeout that is far longer could bring it about too."""
