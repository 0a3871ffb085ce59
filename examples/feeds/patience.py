"""How patient the demo is: as it is shown, it ends within half a minute, which a slow machine cannot keep."""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("DEMO_PATIENCE", "1"))
"""How many times as long as usual leases and limits are; the tests have more, as they show no times."""
