"""Links between ranks on several hosts: shared memory within a host, a network between hosts."""
