"""Messages, sockets, streams and processes that poprun and its agents share."""
