"""How much memory a training takes, told before anything runs."""
