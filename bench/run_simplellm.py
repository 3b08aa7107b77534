"""compare.py's worker for SimpleLLM: MODEL and options as JSON in argv, works as lines on stdin, records on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simplellm.bench import inter  # noqa: E402
from simplellm.bench.decode import open_engine  # noqa: E402
from simplellm.bench.work import Meter, Work, about, rounded  # noqa: E402


def main() -> None:
    model, options = sys.argv[1], json.loads(sys.argv[2])
    engine = open_engine(Path(model), {"progress": False, **options})
    print("RECORD " + json.dumps(about(engine)), flush=True)
    meter = Meter(engine)
    for line in sys.stdin:
        asked = json.loads(line)
        if "+" in asked["work"]:
            figures = inter.run(meter, inter.Inter.parse(asked["work"]), asked["seed"])
        else:
            figures = rounded(meter.run(Work.parse(asked["work"]), asked["seed"]))
        print("RECORD " + json.dumps(figures), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
