"""The "popdist" backend of torch.distributed: process groups whose sums have the order of our tree."""
