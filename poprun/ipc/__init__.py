"""Messages, sockets, streams and processes, which poprun and its agents share."""
