"""The command `python -m strategies.dataset_benchmark`; for programs the package has a function of that name."""

from strategies.measure.bottleneck import main

if __name__ == "__main__":
    main()
