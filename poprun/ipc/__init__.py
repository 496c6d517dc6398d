"""What poprun and its agents share: messages, sockets, terminals, processes, and what is left of them."""
