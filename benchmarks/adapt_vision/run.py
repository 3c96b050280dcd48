"""The adapt benchmark on images: ``benchmarks/adapt_text/run.py --suite vision``, which takes the same options.

.venv/bin/python benchmarks/adapt_vision/run.py [--measure] [--int8] [--promises RUN] [--plots] [--quick]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    text = Path(__file__).parents[1] / "adapt_text"
    sys.path.insert(0, str(text))
    sys.argv[1:1] = ["--suite", "vision"]
    runpy.run_path(str(text / "run.py"), run_name="__main__")
