"""Makes the helper beside the tests importable (--import-mode=importlib leaves the test folder out of the path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
