"""Makes the modules beside the tests importable (--import-mode=importlib does not add the folder to
the path).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
