"""The engine tests here need a rollout engine and its policies: the harness of tests/engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
