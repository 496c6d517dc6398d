"""The step as an object: options, engine, one update after another, and the records of them."""
