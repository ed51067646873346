"""python tests/hub CACHE [command ...]: run a command against the local Hub, or serve it until interrupted."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from hub import serve  # after its path

with serve(Path(sys.argv[1]).absolute()):
    if len(sys.argv) > 2:
        sys.exit(subprocess.run(sys.argv[2:]).returncode)
    import os
    import signal

    print(f"export HF_ENDPOINT={os.environ['HF_ENDPOINT']} HF_HOME={os.environ['HF_HOME']}", flush=True)
    signal.pause()
