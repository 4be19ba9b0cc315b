"""`python -m training`, from the root of the repository, whether Baton is installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from training.train import main

if __name__ == "__main__":
    main()
