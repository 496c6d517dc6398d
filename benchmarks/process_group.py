"""Process groups of torch.distributed: the backend popdist against gloo, in the same processes, in turns.

Usage, in a checkout:

    python benchmarks/process_group.py [--ranks 2] [--sizes 4K 1M] [--models cnn mlp] [--rounds 30] [--json PATH]

Columns: ms for a call of the slowest rank with popdist and with gloo, medians of rounds, and the median of their ratios
within a round with its quartiles. Rows: `all_reduce` of float32, and steps of DistributedDataParallel with Adam and 64
rows per rank. Each rank has one core, if there are enough, and one thread of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median, quantiles

from all_reduce import in_units, size
from timing import Machine, command_line, mpirun_command, one_core_each, output_lines

RANK_PROGRAM = Path(__file__).with_name("process_group_rank.py")
SETTINGS = ("ranks", "sizes", "models", "rounds")
MODELS = ("cnn", "mlp", "transformer")


def main() -> None:
    options = read_options()
    machine = Machine()
    cpus = one_core_each(options.ranks)
    task = json.dumps({name: getattr(options, name) for name in SETTINGS[1:]})
    print(f"{options.ranks} ranks, one core each; ms, medians of {options.rounds} rounds")
    print(f"{'':<18}{'popdist':>10}{'gloo':>10}{'ratio':>8}{'quarters':>16}")
    rows = []
    for line in output_lines(mpirun_command(cpus, [sys.executable, str(RANK_PROGRAM), task]), options.limit_s):
        row = json.loads(line)
        rows.append(row)
        print(formatted(row), flush=True)
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="(%(default)s)")
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    add("--sizes", type=size, nargs="*", default=sizes, metavar="BYTES", help="sizes of the tensor (4K 64K 1M 16M)")
    add("--models", nargs="*", choices=MODELS, default=["cnn", "mlp"], help="(cnn mlp)")
    add("--rounds", type=int, default=30, metavar="N", help="turns of each backend (%(default)s)")
    add("--limit-s", type=float, default=600.0, metavar="S", help="time limit (%(default)s)")
    return parser.parse_args()


def formatted(row: dict[str, object]) -> str:
    popdist, gloo = row["popdist_s"], row["gloo_s"]
    assert isinstance(popdist, list)
    assert isinstance(gloo, list)
    ratios = [one / other for one, other in zip(popdist, gloo, strict=True)]
    first, _, third = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    case = row["case"]
    name = f"all_reduce {in_units(case)}" if isinstance(case, int) else f"DDP {case}"
    figures = f"{1e3 * median(popdist):>10.3f}{1e3 * median(gloo):>10.3f}{median(ratios):>8.2f}"
    return f"{name:<18}{figures}{f'{first:.2f} - {third:.2f}':>16}"


if __name__ == "__main__":
    main()
