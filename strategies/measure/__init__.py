"""How fast data sets and infeeds are."""
