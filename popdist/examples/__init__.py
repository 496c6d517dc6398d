"""Example programs; `python -m popdist.examples.digits` starts the first of them."""
