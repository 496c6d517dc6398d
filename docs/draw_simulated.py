"""Drawing of docs/pictures/simulated_all_reduce.svg: the curves of `poprun simulate plot`.

python docs/draw_simulated.py     after a change of the network model or of plans; takes half a minute
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from dark import with_dark

from collectives.simulation.__main__ import main

PICTURE = Path(__file__).with_name("pictures") / "simulated_all_reduce.svg"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, PICTURE.name)
        main(["plot", "--output", str(drawn)])
        text = "\n".join(line.rstrip() for line in drawn.read_text(encoding="utf-8").splitlines())
        PICTURE.write_text(with_dark(text) + "\n", encoding="utf-8")
