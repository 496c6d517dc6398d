"""What poprun and its shims share: messages, sockets, terminals, processes, and what is left of them."""
