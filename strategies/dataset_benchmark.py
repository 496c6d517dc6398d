"""The command `python -m strategies.dataset_benchmark`; programs call `strategies.dataset_benchmark()` instead."""

from strategies.measure.bottleneck import main

if __name__ == "__main__":
    main()
